"""Permute: copy each row's token into expert order, for a GEMM along the rows.

    out[r, h] = w[slot] · x[slot // K, h]        slot = row_to_slot[r],  r < expert_offsets[E]

Without weights a plain copy; with them the product is rounded once. The forward needs no such copy.
A weight gradient reads every row as often as its matrix has tiles across, so that the copy costs
less than gathering each time. T tokens, K experts per token, S = T·K rows, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options
from tmoe.kernels.sort import SortedTokens

BLOCK_R = 8  # rows of a program


@triton.jit(do_not_specialize=["num_experts", "top_k"])
def _permute_kernel(
    out_ptr,  # (S, H)  written
    x_ptr,  # (T, H)
    row_weight_ptr,  # (T·K,)  routing weight of each slot; or None
    row_to_slot_ptr,  # (S,)
    expert_offsets_ptr,  # (E+1,)
    num_experts, H, top_k, stride_out, stride_x_t, stride_x_h,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(S, BLOCK_R),)."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    has_slot = rows < tl.load(expert_offsets_ptr + num_experts)
    slots = tl.load(row_to_slot_ptr + rows, mask=has_slot, other=0)
    x_rows = x_ptr + (slots // top_k).to(tl.int64)[:, None] * stride_x_t
    out_rows = out_ptr + rows.to(tl.int64)[:, None] * stride_out
    if row_weight_ptr is not None:
        weight = tl.load(row_weight_ptr + slots, mask=has_slot, other=0.0)
        weight = widen(weight).to(tl.float32)[:, None]
    for h in range(0, H, BLOCK_H):
        offs_h = h + tl.arange(0, BLOCK_H)
        mask = has_slot[:, None] & (offs_h < H)[None, :]
        x = tl.load(x_rows + offs_h.to(tl.int64)[None, :] * stride_x_h, mask=mask, other=0.0)
        if row_weight_ptr is not None:
            x = narrow(weight * widen(x).to(tl.float32), out_ptr.dtype.element_ty)
        tl.store(out_rows + offs_h[None, :], x, mask=mask)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def permute(
    out: Tensor, x: Tensor, order: SortedTokens, *, row_weight: Tensor | None = None
) -> Tensor:
    """Write the rows of x (T, H), any strides, in expert order to `out` (S, H) and return it.

    `out` has x's dtype and unit column stride. row_weight: (T·K,) contiguous, multiplied into the
    rows. Rows from expert_offsets[E] on are not written.
    """
    S, H = out.shape
    if S == 0:
        return out
    launch(
        _permute_kernel, (cdiv(S, BLOCK_R),),
        out, x, row_weight, order.row_to_slot, order.expert_offsets,
        order.expert_offsets.numel() - 1, H, order.top_k, out.stride(0), *x.stride(),
        BLOCK_R=BLOCK_R, BLOCK_H=min(1024, max(16, next_power_of_2(H))),
        **pdl_options(out.device),
    )  # fmt: skip
    return out


def permute_ref(
    x: Tensor, row_to_slot: Tensor, top_k: int, row_weight: Tensor | None = None
) -> Tensor:
    """The same in torch, in the dtype of `x`; as many rows as `row_to_slot` has slots."""
    slots = row_to_slot.long()
    rows = x[slots // top_k]
    return rows if row_weight is None else rows * row_weight.flatten()[slots, None].to(x.dtype)
