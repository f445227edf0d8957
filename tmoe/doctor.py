"""What this machine has and what tmoe makes of it, without importing FlashInfer or transformers."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from packaging.version import Version
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .backends.flashinfer.signatures import BELOW
from .backends.flashinfer.support import BLACKWELL, USES
from .dispatch.known import MODELS, problem_of
from .dispatch.measure import known_times
from .dispatch.problem import Machine, Problem
from .dispatch.resolve import Candidate, candidates, duration
from .environment import cache_dir, installed_version, nvidia_driver
from .formats import SCHEMES
from .formats.recipe import Recipe
from .routing import Routing

# Minor versions that were built for each other.
TRITON_OF_TORCH = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}
FLASHINFER = Version("0.6.12")  # tested from


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Facts, and a hint for each combination that is known not to work."""

    versions: dict[str, str | None]  # None: not installed
    device: str
    capability: tuple[int, int] | None
    driver: str | None
    interpreted: bool
    cache_dir: str
    cache_problem: str | None  # None: it can be written
    operations: dict[str, tuple[Candidate, ...]]  # what every backend says to each of them
    hints: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Plain values only, for JSON."""
        return asdict(self)

    def as_rich(self) -> Group:
        """For the terminal: facts, which backend runs an operation, why others can't, hints."""
        chosen = Table("operation", "runs on", "because", title="DeepSeek-V3, 64 tokens")
        refused: dict[tuple[str, str], list[str]] = {}
        for operation, answers in self.operations.items():
            first = next(answer for answer in answers if answer.accepted)
            timing = "" if first.timing is None else f"{duration(first.timing)}; "
            chosen.add_row(operation, first.name, Text(timing + first.reason))
            for answer in answers:
                if not answer.accepted:
                    refused.setdefault((answer.name, answer.reason), []).append(operation)
        reasons = Table("backend", "can't run", "because")
        for (name, reason), operations in refused.items():
            every = len(operations) == len(self.operations)
            reasons.add_row(name, "anything" if every else ", ".join(operations), Text(reason))
        hints = [Text.assemble(("hint", "yellow"), f" {hint}") for hint in self.hints]
        return Group(self._facts(), chosen, *([reasons] if refused else []), *hints)

    def _facts(self) -> Table:
        rows = {name: value or "not installed" for name, value in self.versions.items()}
        rows["device"] = self.device
        if self.capability is not None:
            rows["capability"] = ".".join(map(str, self.capability))
            rows["driver"] = self.driver or "unknown"
        rows["Triton interpreter"] = "on" if self.interpreted else "off"
        rows["cache folder"] = self.cache_dir
        problem = self.cache_problem
        rows[""] = "writable" if problem is None else f"can't be written: {problem}"
        table = Table(show_header=False, box=None)
        for name, value in rows.items():
            table.add_row(name, Text(value))  # a folder's brackets are brackets
        return table


def diagnose() -> Diagnosis:
    """Look at this machine. Writes one temporary file, to see whether the cache folder takes it."""
    machine = Machine.of("cuda" if torch.cuda.is_available() else "cpu")
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": machine.triton_version,
        "numpy": installed_version("numpy"),
        "transformers": installed_version("transformers"),
        "flashinfer": machine.flashinfer_version,
    }
    operations = {
        name: candidates(problem, times=known_times(problem))
        for name, problem in standard_problems(machine).items()
    }
    folder = cache_dir()
    return Diagnosis(
        versions=versions,
        device=machine.name,
        capability=machine.capability,
        driver=nvidia_driver() if machine.device_type == "cuda" else None,
        interpreted=machine.interpreted,
        cache_dir=str(folder),
        cache_problem=why_not_writable(folder),
        operations=operations,
        hints=tuple(hints(versions, machine)),
    )


def standard_problems(machine: Machine) -> dict[str, Problem]:
    """Each operation as DeepSeek-V3 has it, with 64 tokens, inference, in the usual dtype of
    `machine`; weights count as prepared for whoever wants that."""
    layer = MODELS["deepseek-v3"]
    dtype = torch.float32 if machine.device_type == "cpu" else torch.bfloat16
    routing = Routing(256, 8, "DeepSeekV3", n_group=8, topk_group=4, scaling_factor=2.5)
    plain = problem_of(layer, machine, num_tokens=64, dtype=dtype)
    gemm = replace(plain, op="grouped_gemm", top_k=1, activation=None)
    quantize = replace(gemm, op="quantize", intermediate=0, num_experts=0)
    route = replace(gemm, op="route", hidden=0, intermediate=0, top_k=8)
    route = replace(route, routing=routing, has_bias=True)
    problems = {"route": route}
    for name in ("fp8_block", "mxfp8", "nvfp4"):
        recipe = Recipe.of("doctor", name)
        problems[f"quantize to {name}"] = replace(quantize, recipe=recipe, scheme=name)
    for scheme in ("bf16", *SCHEMES):
        asked = None if scheme == "bf16" else scheme
        problems[f"fused_experts, {scheme}"] = problem_of(
            layer, machine, num_tokens=64, dtype=dtype, scheme=asked
        )
    return problems | {"grouped_gemm, bf16": gemm}


def hints(versions: dict[str, str | None], machine: Machine) -> list[str]:
    """A sentence for each combination of versions that is known to go wrong, and what to do."""
    found = []
    torch_minor = _minor(machine.torch_version)
    wanted = TRITON_OF_TORCH.get(torch_minor)
    triton = machine.triton_version
    if triton is None:
        pin = f"triton=={wanted}.*" if wanted else "triton"
        found.append(f"Triton isn't installed: pip install '{pin}'")
    elif wanted is not None and _minor(triton) != wanted:
        found.append(f"torch {torch_minor} goes with Triton {wanted}, this is Triton {triton}")
    newest = max(TRITON_OF_TORCH.values(), key=Version)
    if triton is not None and Version(_minor(triton)) > Version(newest):
        found.append(
            f"Triton {triton} is newer than {newest}, the newest that tmoe knows: calls with few "
            "tokens aren't replayed, and FP8 blocks have no kernel of their own on Hopper"
        )
    numpy = versions["numpy"]
    if triton is not None and _minor(triton) == "3.6" and numpy is not None:
        if Version(numpy) >= Version("2.4"):
            found.append(
                f"Triton 3.6's interpreter breaks with NumPy {numpy}: pip install 'numpy<2.4', "
                "or a newer Triton (only TRITON_INTERPRET=1 is affected)"
            )
    if machine.interpreted and machine.device_type == "cuda":
        found.append("TRITON_INTERPRET=1 is set: kernels run on the CPU, slowly; unset it")
    flashinfer = versions["flashinfer"]
    low, high = FLASHINFER, Version(".".join(map(str, BELOW)))
    floors = [use.entry.promoted_from for uses in USES.values() for use in uses.values()]
    complete = max(map(Version, floors))
    if flashinfer is not None and not low <= Version(flashinfer) < high:
        found.append(f"FlashInfer {flashinfer} is outside the tested range >={low},<{high}")
    if machine.capability in BLACKWELL and flashinfer is None:
        found.append("FlashInfer has kernels for this GPU: pip install 'tmoe[flashinfer]'")
    elif machine.capability in BLACKWELL and low <= Version(flashinfer or "0") < complete:
        found.append(
            f"FlashInfer {flashinfer} has faults that {complete} mended, so not all of it is used: "
            f"pip install 'flashinfer-python>={complete},<{high}'"
        )
    if machine.device_type == "cuda" and flashinfer is not None and not _builds_kernels():
        found.append(
            "FlashInfer builds kernels when they are first used, and finds no nvcc: install the "
            "CUDA toolkit and set CUDA_HOME, or install flashinfer-jit-cache"
        )
    return found


def _builds_kernels() -> bool:
    """Whether FlashInfer finds a compiler, or what it would compile."""
    home = os.environ.get("CUDA_HOME")
    has_compiler = shutil.which("nvcc") or (home and (Path(home) / "bin" / "nvcc").exists())
    return bool(has_compiler) or installed_version("flashinfer-jit-cache") is not None


def _minor(text: str) -> str:
    parsed = Version(text)
    return f"{parsed.major}.{parsed.minor}"


def why_not_writable(folder: Path) -> str | None:
    """Make `folder`, and a file in it for a moment; what the system says if it can't be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
