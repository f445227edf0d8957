"""Our Triton kernels on a CPU: a small layer under Triton's interpreter, checked against torch.

The interpreter is chosen by an environment variable that must be set before Triton is imported, so
`run_interpreted` starts a process of its own, and that runs this file:

    TRITON_INTERPRET=1 python -m tmoe.demo.interpreted layer.safetensors
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tmoe

from .verdict import error_and_bound, experts_fp64

TIMEOUT = 300  # seconds


class Layer(NamedTuple):
    """The first arguments of `tmoe.fused_experts`, in its order."""

    x: Tensor  # (T, H)
    gate_up_proj: Tensor  # (E, 2I, H)
    down_proj: Tensor  # (E, H, I)
    topk_weights: Tensor  # (T, K)
    topk_ids: Tensor  # (T, K)

    def to(self, dtype: torch.dtype) -> Layer:
        """The same layer with activations and weights in `dtype`."""
        x, gate_up_proj, down_proj = (t.to(dtype) for t in self[:3])
        return Layer(x, gate_up_proj, down_proj, self.topk_weights, self.topk_ids)


@dataclass(frozen=True, slots=True)
class Interpreted:
    """How one run under the interpreter went."""

    dtype: str
    error: float
    allowed: float
    seconds: float


def run_interpreted(layer: Layer) -> list[Interpreted]:
    """Run `layer` in the interpreter, in fp32 and in bf16.

    Raises:
        subprocess.CalledProcessError: the process failed; its stderr has the reason.
    """
    # The new process must find this very package, however this one found it.
    own = str(Path(__file__).parents[2])
    search_path = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "layer.safetensors"
        save_file({name: t.cpu().contiguous() for name, t in layer._asdict().items()}, file)
        done = subprocess.run(
            [sys.executable, "-m", "tmoe.demo.interpreted", str(file)],
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": search_path},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=True,
        )
    return [Interpreted(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def compare(layer: Layer) -> Interpreted:
    """Triton and torch on the same layer, both against fp64."""
    with tmoe.options(backend="torch"):
        peer = tmoe.fused_experts(*layer)
    started = time.perf_counter()
    with tmoe.options(backend="triton"):
        got = tmoe.fused_experts(*layer)
    seconds = time.perf_counter() - started
    error, allowed = error_and_bound(got, experts_fp64(*layer), peer)
    return Interpreted(str(got.dtype).removeprefix("torch."), error, allowed, seconds)


if __name__ == "__main__":
    loaded = Layer(**load_file(sys.argv[1]))
    results = [compare(loaded.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    print(json.dumps([asdict(result) for result in results]))
