"""Low-rank adapters: a few more columns of depth for a product that is finished otherwise.

    acc[r, n] += sum_j low[r, j] · up[e, n, j]          r in the rows of expert e, j < rank

`low` is x · A[e]ᵀ, a grouped GEMM of its own with few columns, in the same row order; `up` is B[e].
The sum joins acc in fp32, before bias and activation, so that W + B · A is never made.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import widen
from tmoe.kernels.launch import next_power_of_2


@triton.jit
def add_low_rank(
    adapter, acc, expert, rows, in_expert, w_rows,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, COLUMNS] with the adapter's product; `w_rows` [COLUMNS] are its rows of up."""
    low_ptr, up_ptr, rank, stride_low, up_strides = adapter
    offs_r = tl.arange(0, BLOCK_R)
    low_ptrs = low_ptr + rows.to(tl.int64)[:, None] * stride_low + offs_r[None, :]
    up_ptrs = up_ptr + expert.to(tl.int64) * up_strides[0] + offs_r[None, :] * up_strides[2]
    up_ptrs += w_rows.to(tl.int64)[:, None] * up_strides[1]
    for r in range(0, rank, BLOCK_R):
        in_rank = offs_r[None, :] < rank - r
        low = widen(tl.load(low_ptrs, mask=in_expert[:, None] & in_rank, other=0.0))
        up = widen(tl.load(up_ptrs, mask=in_rank, other=0.0))
        if BLOCK_M < 16:  # too few rows for the left operand
            acc += tl.dot(up, low.T, input_precision=PRECISION).T
        else:
            acc = tl.dot(low, up.T, acc, input_precision=PRECISION)
        low_ptrs += BLOCK_R
        up_ptrs += BLOCK_R * up_strides[2]
    return acc


@dataclass(frozen=True, slots=True)
class LowRankRows:
    """The second factor of an adapter and what the first one made of the rows.

    low: (S, rank), unit column stride, the GEMM's number type. up: (E, N, rank), if gated
    (E, 2N, rank), with the rows in the order of the weights'; any strides.
    """

    low: Tensor
    up: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, int, tuple[int, ...]]:
        return self.low, self.up, self.low.shape[1], self.low.stride(0), self.up.stride()

    @property
    def block_r(self) -> int:
        return min(64, max(16, next_power_of_2(self.low.shape[1])))


NO_ARGUMENTS = (None, None, 0, 0, (0, 0, 0))
