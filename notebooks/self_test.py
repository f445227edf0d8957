"""Does Triton compute a small loop rightly here? Some pairs of versions don't, without an error."""

from __future__ import annotations

import numpy
import torch
import triton
import triton.language as tl
from packaging.version import Version

OLD = "Triton 3.6 needs NumPy 2.3 to interpret loops; `pip install 'numpy<2.4'` or a newer Triton"
WRONG = "Triton computes a small sum wrongly on this machine; try another version of Triton"


@triton.jit
def _sum_kernel(out_ptr, x_ptr, n, BLOCK: tl.constexpr):
    total = 0.0
    for start in range(0, n, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + index, mask=index < n, other=0.0))
    tl.store(out_ptr, total)


def problem(device: torch.device) -> str | None:
    """None, or what is wrong, as one sentence."""
    if device.type == "cpu" and _loops_break():
        return OLD
    x, out = torch.arange(1.0, 41.0, device=device), torch.zeros(1, device=device)
    _sum_kernel[(1,)](out, x, 37, BLOCK=16)
    return None if out.item() == 37 * 38 / 2 else WRONG


def _loops_break() -> bool:
    return triton.__version__.startswith("3.6.") and Version(numpy.__version__) >= Version("2.4")
