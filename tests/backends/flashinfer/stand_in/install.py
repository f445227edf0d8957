"""The stand-in in FlashInfer's place: modules, functions with their signatures, enums, version."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from tests.backends.flashinfer.stand_in.checks import Checks, Misuse
from tests.backends.flashinfer.stand_in.cutlass import OP, cutlass
from tests.backends.flashinfer.stand_in.faults import checked, faults_of
from tests.backends.flashinfer.stand_in.trtllm import trtllm
from tmoe.backends.flashinfer.signatures import SourceText, enum_members, signature
from tools.record_flashinfer import ENTRY_POINTS, ENUMS

UNSET = object()  # FlashInfer's word for an argument that wasn't given
TRTLLM = tuple(
    f"trtllm_{kind}_{routed}moe"
    for kind in ("bf16", "fp8_per_tensor_scale", "fp8_block_scale", "fp4_block_scale")
    for routed in ("", "routed_")
)


@dataclass
class Fake:
    """One installed stand-in."""

    version: Version
    faults: frozenset[str]
    capability: tuple[int, int] | None  # of the device that it is on; None: any is fine
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # entry point, keywords
    enums: dict[str, type[IntEnum]] = field(default_factory=dict)

    def member_name(self, checks: Checks, args: dict[str, Any], arg: str, enum: str) -> str:
        """The name of a member that is given by its number."""
        value = args[arg]
        numbers = {int(member): member.name for member in self.enums[enum]}
        checks.refuse(isinstance(value, int), arg, f"a number of {enum}", value, TypeError)
        checks.refuse(int(value) in numbers, arg, f"a number of {enum}", value)
        return numbers[int(value)]

    def run(self, op: str, bound: inspect.BoundArguments) -> Tensor | list[Tensor]:
        """Answer a call."""
        self.calls.append((op, dict(bound.arguments)))
        if "raises" in self.faults:
            raise RuntimeError(f"{op}: the stand-in was asked to raise")
        bound.apply_defaults()
        args = {name: self._value(value) for name, value in bound.arguments.items()}
        devices = {str(value.device) for value in args.values() if isinstance(value, Tensor)}
        Checks(op).misuse(len(devices) == 1, "tensors", "on one device", devices)
        with torch.no_grad():
            result = cutlass(self, args) if op == OP else trtllm(self, op, args)
            if "nan_answer" in self.faults:
                (result[0] if isinstance(result, list) else result).fill_(torch.nan)
        return result

    def _value(self, value: Any) -> Any:
        """What a default's source text means."""
        if not isinstance(value, SourceText):
            return value
        enum, _, member = value.partition(".")
        return UNSET if not member else self.enums[enum][member.partition(".")[0]]


@contextmanager
def installed(
    version: str,
    faults: Iterable[str] | None = None,
    capability: tuple[int, int] | None = None,
) -> Iterator[Fake]:
    """FlashInfer `version` is installed, as far as Python can tell; what was before comes back.

    Args:
        faults: names of `FAULTS`; None: those that this version has. ``()`` mends it.
        capability: of the device that the tensors stand for; None: any is fine.
    """
    v = Version(version)
    fake = Fake(v, faults_of(version) if faults is None else checked(faults), capability)
    for name in ENUMS:
        if members := enum_members(v, name):
            fake.enums[name] = IntEnum(name, dict(members))
    finder = _Finder(fake)
    with hidden():
        sys.meta_path.insert(0, finder)
        try:
            yield fake
        finally:
            sys.meta_path.remove(finder)


@contextmanager
def hidden() -> Iterator[None]:
    """Modules that are imported as FlashInfer's go on leaving, and what was before comes back."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _ours(module: str) -> bool:
    return module.partition(".")[0] == "flashinfer"


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds and fills the stand-in's modules, and names its version."""

    def __init__(self, fake: Fake) -> None:
        self._fake = fake

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name not in ENTRY_POINTS:
            return None
        package = any(other.startswith(f"{name}.") for other in ENTRY_POINTS)
        return importlib.machinery.ModuleSpec(name, self, is_package=package)

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        wanted = getattr(context, "name", None)
        if wanted is None or wanted.lower().replace("_", "-") == "flashinfer-python":
            yield _Distribution(self._fake.version)

    def exec_module(self, module: ModuleType) -> None:
        name, fake = module.__name__, self._fake
        if "import_error" in fake.faults:
            raise RuntimeError(f"flashinfer-cubin version does not match {fake.version}")
        for function in ENTRY_POINTS[name]:
            takes = signature(fake.version, function)
            if takes is not None:
                setattr(module, function, _function(fake, function, takes))
        if name in ("flashinfer", "flashinfer.fused_moe"):
            for enum, members in fake.enums.items():
                if (enum == "SfLayout") == (name == "flashinfer"):
                    setattr(module, enum, members)
        if name == "flashinfer":
            module.__version__ = str(fake.version)
            for other in ENTRY_POINTS:
                importlib.import_module(other)


class _Distribution(importlib.metadata.Distribution):
    """What `importlib.metadata` reads a version from."""

    def __init__(self, version: Version) -> None:
        self._version = version

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {self._version}\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


def _function(fake: Fake, op: str, takes: inspect.Signature) -> Callable[..., Any]:
    def function(*args: Any, **keywords: Any) -> Any:
        bound = takes.bind(*args, **keywords)
        if op != OP and op not in TRTLLM:
            raise Misuse(f"{op}: the stand-in doesn't compute it")
        if args:
            raise Misuse(f"{op}: must be called by keyword: parameters move between versions")
        return fake.run(op, bound)

    function.__name__ = function.__qualname__ = op
    function.__signature__ = takes
    return function
