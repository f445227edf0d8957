"""The same values in other memory layouts."""

from __future__ import annotations

from torch import Tensor


def _wider(x: Tensor) -> Tensor:
    """x as a slice of a tensor with NaN around it."""
    big = x.new_full([size + 3 for size in x.shape], float("nan"))
    inner = big[tuple(slice(1, size + 1) for size in x.shape)]
    inner.copy_(x)
    return inner


STRIDED = {
    "transposed-storage (WL03)": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "slice-of-a-wider-tensor (NC02)": _wider,
    "other-axes-swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}
