"""Bias gradient: the sum of each expert's rows.

    out[e, n] = sum_r w[r] · rows[r, n]        r in the rows of expert e

`rows` stand in expert order or, gathered, in token order; w is the routing weight of a row's slot,
where it comes after the bias. The sum runs in fp32, BLOCK_S partial sums over every BLOCK_S-th row
and then these, whatever the other experts get. An expert without rows gets zeros. S rows, E
experts, N columns.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options
from tmoe.kernels.sort import SortedTokens


@triton.jit(do_not_specialize=["top_k"])
def _bias_gradient_kernel(
    out_ptr,  # (E, N)  written
    rows_ptr,  # (T, N) if GATHER, else (S, N)
    row_weight_ptr,  # (T·K,)  routing weight of each slot; or None
    row_to_slot_ptr,  # (S,)
    expert_offsets_ptr,  # (E+1,)
    N, top_k, out_strides, stride_rows,
    GATHER: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (E, cdiv(N, BLOCK_N))."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_row = tl.load(expert_offsets_ptr + expert)
    end_row = tl.load(expert_offsets_ptr + expert + 1)
    sums = tl.zeros((BLOCK_S, BLOCK_N), tl.float32)
    for row in range(first_row, end_row, BLOCK_S):
        rows = row + tl.arange(0, BLOCK_S)
        in_expert = rows < end_row
        at, weight = rows, 1.0
        if GATHER or row_weight_ptr is not None:
            slots = tl.load(row_to_slot_ptr + rows, mask=in_expert, other=0)
            if GATHER:
                at = slots // top_k
            if row_weight_ptr is not None:
                weight = tl.load(row_weight_ptr + slots, mask=in_expert, other=0.0)
                weight = widen(weight).to(tl.float32)[:, None]
        ptrs = rows_ptr + at.to(tl.int64)[:, None] * stride_rows + columns[None, :]
        x = tl.load(ptrs, mask=in_expert[:, None] & (columns < N)[None, :], other=0.0)
        sums += weight * widen(x).to(tl.float32)
    out_ptrs = out_ptr + expert.to(tl.int64) * out_strides[0] + columns * out_strides[1]
    total = narrow(tl.sum(sums, 0), out_ptr.dtype.element_ty)
    tl.store(out_ptrs, total, mask=columns < N)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def bias_gradient(
    out: Tensor,
    rows: Tensor,
    order: SortedTokens,
    *,
    gather: bool = False,
    row_weight: Tensor | None = None,
) -> Tensor:
    """Write the sum of each expert's rows to `out` (E, N), any strides, and return it.

    rows: (S, N) in expert order or with `gather` (T, N), unit column stride. row_weight: (T·K,)
    contiguous. Rows from expert_offsets[E] on are never read.
    """
    E, N = out.shape
    block_n = min(128, max(16, next_power_of_2(N)))
    launch(
        _bias_gradient_kernel, (E, cdiv(N, block_n)),
        out, rows, row_weight, order.row_to_slot, order.expert_offsets,
        N, order.top_k, out.stride(), rows.stride(0),
        GATHER=gather, BLOCK_S=32, BLOCK_N=block_n, **pdl_options(out.device),
    )  # fmt: skip
    return out


def bias_gradient_ref(rows: Tensor, expert_offsets: Tensor) -> Tensor:
    """The same in torch, in the dtype of `rows` (S, N), in expert order and weighted already."""
    return torch.stack([rows[a:b].sum(0) for a, b in pairwise(expert_offsets.tolist())])
