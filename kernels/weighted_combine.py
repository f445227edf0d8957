"""Weighted combine: what the routing weight on an expert's input needs on the way back.

    out[t, h]   = sum_k w[t, k] · rows[slot_to_row[t, k], h]
    dots[t, k]  = <rows[slot_to_row[t, k]], x[t]>              slot_to_row = -1: 0

`rows` is the gradient of the weighted inputs w · x, so `out` is the gradient of x and `dots` that
of w. Sums run in fp32 in a fixed order. T tokens, K experts per token, S = T·K rows, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.launch import launch, next_power_of_2, pdl_options


@triton.jit
def _weighted_combine_kernel(
    out_ptr,  # (T, H)  written; or None
    dots_ptr,  # (T, K) fp32  written; or None
    rows_ptr,  # (S, H)  sorted by expert
    x_ptr,  # (T, H)
    weights_ptr,  # (T, K)
    slot_to_row_ptr,  # (T, K) int32; -1 = not local
    H, stride_out, stride_rows, stride_x_t, stride_x_h,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T,)."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    row = tl.load(slot_to_row_ptr + t * K + offs_k, mask=offs_k < K, other=-1)
    has_row = row >= 0
    weights = tl.load(weights_ptr + t * K + offs_k, mask=has_row, other=0.0)
    weights = widen(weights).to(tl.float32)[:, None]
    products = tl.zeros((BLOCK_K, BLOCK_H), tl.float32)
    for h in range(0, H, BLOCK_H):
        offs_h = h + tl.arange(0, BLOCK_H)
        in_row = offs_h < H
        ptrs = rows_ptr + row.to(tl.int64)[:, None] * stride_rows + offs_h[None, :]
        loaded = tl.load(ptrs, mask=has_row[:, None] & in_row[None, :], other=0.0)
        rows = widen(loaded).to(tl.float32)
        if dots_ptr is not None:
            x_ptrs = x_ptr + t * stride_x_t + offs_h.to(tl.int64) * stride_x_h
            x = widen(tl.load(x_ptrs, mask=in_row, other=0.0)).to(tl.float32)
            # A select: where there is no row, x may be anything.
            products += tl.where(has_row[:, None], rows * x[None, :], 0.0)
        if out_ptr is not None:
            total = narrow(tl.sum(weights * rows, 0), out_ptr.dtype.element_ty)
            tl.store(out_ptr + t * stride_out + offs_h, total, mask=in_row)
    if dots_ptr is not None:
        tl.store(dots_ptr + t * K + offs_k, tl.sum(products, 1), mask=offs_k < K)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def weighted_combine(
    rows: Tensor,
    x: Tensor,
    weights: Tensor,
    slot_to_row: Tensor,
    *,
    out: Tensor | None = None,
    dots: Tensor | None = None,
) -> None:
    """Write whichever of `out` (T, H), unit column stride, and `dots` (T, K) fp32 are given.

    rows: (S, H), unit column stride. x: (T, H), any strides. weights: (T, K) contiguous.
    """
    (T, K), H = slot_to_row.shape, rows.shape[1]
    if T == 0:
        return
    block_h = min(1024, max(16, next_power_of_2(H)))
    launch(
        _weighted_combine_kernel, (T,),
        out, dots, rows, x, weights, slot_to_row,
        H, 0 if out is None else out.stride(0), rows.stride(0), *x.stride(),
        K=K, BLOCK_K=next_power_of_2(K), BLOCK_H=block_h, **pdl_options(rows.device),
    )  # fmt: skip


def weighted_combine_ref(
    rows: Tensor, x: Tensor, weights: Tensor, slot_to_row: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, dots) in torch, in the dtype of `rows`."""
    none = slot_to_row < 0
    picked = rows[slot_to_row.clamp(min=0).long()].masked_fill(none[..., None], 0.0)  # (T, K, H)
    dots = (picked * x[:, None]).masked_fill(none[..., None], 0.0).sum(2)
    return (weights.masked_fill(none, 0.0)[..., None] * picked).sum(1), dots
