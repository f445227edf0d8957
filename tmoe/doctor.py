"""What this machine has and what tmoe makes of it, without importing FlashInfer or transformers."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from packaging.version import Version

from .activation import Activation
from .dispatch.problem import Machine, Problem
from .dispatch.resolve import Candidate, candidates
from .environment import cache_dir, installed_version

# Minor versions that were built for each other.
TRITON_OF_TORCH = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8"}
FLASHINFER = (Version("0.6.12"), Version("0.8"))  # tested from, and below


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
    backends: tuple[Candidate, ...]
    hints: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Plain values only, for JSON."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Look at this machine. Writes one temporary file, to see whether the cache folder takes it."""
    machine = Machine.of("cuda" if torch.cuda.is_available() else "cpu")
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": machine.triton_version,
        "numpy": installed_version("numpy"),
        "transformers": installed_version("transformers"),
        "flashinfer": installed_version("flashinfer-python"),
    }
    folder = cache_dir()
    return Diagnosis(
        versions=versions,
        device=machine.name,
        capability=machine.capability,
        driver=_driver() if machine.device_type == "cuda" else None,
        interpreted=machine.interpreted,
        cache_dir=str(folder),
        cache_problem=_why_not_writable(folder),
        backends=candidates(standard_problem(machine)),
        hints=tuple(hints(versions, machine)),
    )


def standard_problem(machine: Machine) -> Problem:
    """A layer of Mixtral-8x7B with 64 tokens, inference, in the usual dtype of `machine`."""
    dtype = torch.float32 if machine.device_type == "cpu" else torch.bfloat16
    return Problem(
        op="fused_experts",
        tokens=64,
        hidden=4096,
        intermediate=14336,
        num_experts=8,
        top_k=2,
        dtype=dtype,
        machine=machine,
        activation=Activation.swiglu(),
    )


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
    if flashinfer is not None and not FLASHINFER[0] <= Version(flashinfer) < FLASHINFER[1]:
        low, high = FLASHINFER
        found.append(f"FlashInfer {flashinfer} is outside the tested range >={low},<{high}")
    return found


def _minor(text: str) -> str:
    parsed = Version(text)
    return f"{parsed.major}.{parsed.minor}"


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def _why_not_writable(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
