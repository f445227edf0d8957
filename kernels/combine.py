"""Combine: add up each token's K expert rows.

    out[t, h] = sum_k rows[slot_to_row[t, k], h]        slot_to_row = -1 contributes nothing

The routing weight is in the rows already: the down projection applies it in fp32, before it rounds,
so that a large expert output times a small weight does not overflow fp16. The sum runs in fp32 in
the order of k, whatever the batch. T tokens, K experts per token, S = T·K rows, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options
from tmoe.kernels.sort import OneToken, token_expert


@triton.jit
def _combine_kernel(
    out_ptr,  # (T, H)  written
    rows_ptr,  # (S, H)  weighted expert outputs
    slot_to_row_ptr,  # (T, K) int32; -1 = not local; or None
    token,  # of `token_expert`, if T is 1 and its rows are its slots; or None
    H, stride_out_t, stride_out_h, stride_rows,
    K: tl.constexpr, BLOCK_H: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T, cdiv(H, BLOCK_H))."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for k in tl.static_range(K):
        if token is None:
            row = tl.load(slot_to_row_ptr + t * K + k).to(tl.int64)
        else:
            row = tl.where(token_expert(token, k)[1], k, -1).to(tl.int64)
        x = tl.load(rows_ptr + row * stride_rows + offs_h, mask=mask_h & (row >= 0), other=0.0)
        acc += widen(x).to(tl.float32)
    out_ptrs = out_ptr + t * stride_out_t + offs_h.to(tl.int64) * stride_out_h
    tl.store(out_ptrs, narrow(acc, out_ptr.dtype.element_ty), mask=mask_h)


def combine(rows: Tensor, slot_to_row: Tensor | OneToken, out: Tensor) -> Tensor:
    """Write the sum of each token's rows (S, H) to `out` (T, H) and return it. `rows` has unit
    column stride."""
    if isinstance(slot_to_row, OneToken):
        slots, token, K = None, slot_to_row.token, slot_to_row.most_tiles
    else:
        slots, token, K = slot_to_row, None, slot_to_row.shape[1]
    T, H = out.shape
    if out.numel() == 0:
        return out
    block_h = min(1024, max(16, next_power_of_2(H)))
    launch(
        _combine_kernel, (T, cdiv(H, block_h)),
        out, rows, slots, token, H, out.stride(0), out.stride(1), rows.stride(0),
        K=K, BLOCK_H=block_h, **pdl_options(out.device),
    )  # fmt: skip
    return out


def combine_ref(rows: Tensor, slot_to_row: Tensor) -> Tensor:
    """The same in torch, in the dtype of `rows`: (T, H)."""
    picked = rows[slot_to_row.clamp(min=0).long()]  # (T, K, H)
    return picked.masked_fill((slot_to_row < 0)[..., None], 0.0).sum(1)
