"""Sum: add up what the ranks of a token's experts say about it.

    out[t, h] = sum over columns c with r = rows[t, c] >= 0 of
                back[r, h]               if r < num_sent: it came back
                own[r - num_sent, h]     otherwise: it never left

The sum runs in fp32 in the order of the columns, whatever the batch. T tokens, H hidden; columns:
ranks, or slots where every expert says something for itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options


@triton.jit(do_not_specialize=["num_sent"])
def _sum_kernel(
    out_ptr,  # (T, H)  written
    back_ptr,  # (num_sent, H)
    own_ptr,  # (rows that stay, H)
    rows_ptr,  # (T, columns) int32
    H, columns, num_sent, stride_out, stride_back, stride_own,
    BLOCK_H: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T, cdiv(H, BLOCK_H))."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for c in range(columns):
        row = tl.load(rows_ptr + t * columns + c).to(tl.int64)
        came = (row >= 0) & (row < num_sent)
        x = tl.load(back_ptr + row * stride_back + h, mask=(h < H) & came, other=0.0)
        stayed = row - num_sent
        y = tl.load(own_ptr + stayed * stride_own + h, mask=(h < H) & (stayed >= 0), other=0.0)
        acc += widen(x).to(tl.float32) + widen(y).to(tl.float32)
    out = narrow(acc, out_ptr.dtype.element_ty)
    tl.store(out_ptr + t * stride_out + h, out, mask=h < H)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def sum_rows(out: Tensor, back: Tensor, own: Tensor, rows: Tensor) -> Tensor:
    """Write the sums to `out` (T, H) and return it. back (num_sent, H) and own (n, H), of one
    dtype, rows (T, columns) int32, contiguous; all with dense columns."""
    T, H = out.shape
    if out.numel() == 0:
        return out
    block_h = min(1024, max(16, next_power_of_2(H)))
    launch(
        _sum_kernel, (T, cdiv(H, block_h)),
        out, back, own, rows, H, rows.shape[1], back.shape[0],
        out.stride(0), back.stride(0), own.stride(0),
        BLOCK_H=block_h, **pdl_options(out.device),
    )  # fmt: skip
    return out
