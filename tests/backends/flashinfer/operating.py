"""What the tests of single operations share: problems, and FlashInfer's functions by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from packaging.version import Version

from tests.backends.flashinfer.layers import forget
from tests.backends.flashinfer.stand_in import hidden
from tests.backends.flashinfer.stand_in.operations import OPERATION_FAULTS, OPERATIONS, Misuse
from tmoe.backends.flashinfer.signatures import signature
from tmoe.dispatch.problem import Machine, Problem
from tmoe.formats.recipe import Recipe
from tmoe.routing import Routing
from tools.record_flashinfer import ENTRY_POINTS

GPUS = {
    "H200": ("NVIDIA H200", (9, 0)),
    "B200": ("NVIDIA B200", (10, 0)),
    "B300": ("NVIDIA B300", (10, 3)),
    "B40": ("a B40", (10, 7)),
    "THOR": ("NVIDIA Thor", (11, 0)),
    "RTX5090": ("NVIDIA GeForce RTX 5090", (12, 0)),
    "MI300X": ("AMD Instinct MI300X", (9, 4)),
    "CPU": ("cpu", None),
}
DEEPSEEK = Routing(256, 8, "DeepSeekV3", n_group=8, topk_group=4, scaling_factor=2.5)


def machine(gpu: str = "B200", version: str | None = "0.7.4") -> Machine:
    name, capability = GPUS[gpu]
    device_type = "cpu" if capability is None else "cuda"
    return Machine(
        device_type, name, capability, triton_version="3.7.1", flashinfer_version=version
    )


def route_problem(gpu="B200", version="0.7.4", routing=DEEPSEEK, **changes) -> Problem:
    facts = dict(
        op="route", tokens=64, hidden=0, intermediate=0, num_experts=routing.num_experts,
        top_k=routing.top_k, dtype=torch.float32, machine=machine(gpu, version), routing=routing,
        has_bias=True,
    )  # fmt: skip
    return Problem(**facts | changes)


def quantize_problem(gpu="B200", version="0.7.4", format="mxfp8", rule=None, **changes) -> Problem:
    recipe = Recipe.of("quantize", format, None, rule)
    facts = dict(
        op="quantize", tokens=64, hidden=2048, intermediate=0, num_experts=0, top_k=1,
        dtype=torch.bfloat16, machine=machine(gpu, version), recipe=recipe, scheme=format,
    )  # fmt: skip
    return Problem(**facts | changes)


def gemm_problem(gpu="B200", version="0.7.4", scheme="fp8_block", **changes) -> Problem:
    facts = dict(
        op="grouped_gemm", tokens=64, hidden=2048, intermediate=1536, num_experts=64, top_k=1,
        dtype=torch.bfloat16, machine=machine(gpu, version), scheme=scheme,
    )  # fmt: skip
    return Problem(**facts | changes)


def faults_of(version: str) -> frozenset[str]:
    """What this version gets otherwise than tmoe."""
    v = Version(version)
    since = {name: first for name, (first, _) in OPERATION_FAULTS.items() if first is not None}
    return frozenset(name for name, first in since.items() if Version(first) <= v)


@contextmanager
def flashinfer(version: str = "0.7.4", faults: Any = ()) -> Iterator[list[tuple[str, dict]]]:
    """FlashInfer's functions stand in sys.modules; yields the list of calls."""
    faults, calls = frozenset(faults), []
    assert faults <= OPERATION_FAULTS.keys()

    def function(name):
        takes = signature(Version(version), name)

        def call(*positional, **keywords):
            if positional:
                raise Misuse(f"{name}: parameters move between versions, so call by keyword")
            bound = takes.bind(**keywords)
            calls.append((name, keywords))
            if "raises" in faults:
                raise RuntimeError(f"{name}: no nvcc")
            bound.apply_defaults()
            args = {key: None if str(value) == "_UNSET" else value
                    for key, value in bound.arguments.items()}  # fmt: skip
            return OPERATIONS[name](args, faults)

        call.__signature__ = takes
        return call if takes is not None else None

    try:
        with hidden():
            for home, names in ENTRY_POINTS.items():
                module = sys.modules[home] = ModuleType(home)
                module.__path__ = []
                for name in set(names) & OPERATIONS.keys():
                    if (found := function(name)) is not None:
                        setattr(module, name, found)
            forget()
            yield calls
    finally:
        forget()
