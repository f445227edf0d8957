"""Weight gradient: a grouped GEMM whose contracted dimension is ragged.

    out[e, n, d] = sum_r left[r, n] · right[r, d]        r in the rows of expert e

`left` is the gradient of a projection's output, `right` its input. Of a layer's four such matrices
two stand in expert order, (S, ·), and two in token order, (T, ·): these are gathered on the way in
through `row_to_slot`, so that no permuted copy exists. An expert without rows gets zeros.

A program owns one tile of one expert's matrix and walks along that expert's rows, BLOCK_S at a
time, in a fixed order; sums are fp32. Tiles of one expert follow each other, GROUP_N rows of tiles
going through the columns together, so that what they read is still in L2. An expert of many rows
takes longer than one of few: programs are handed out by the hardware as others end.

Where the rows in expert order can be described, whole steps read them with the copy engine. The
rest of an expert's rows, fewer than a step, come by pointers, since a copied tile would reach into
the next expert's rows or into memory that nobody wrote.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.backward_tiles import GradientTile
from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.descriptors import describe_rows
from tmoe.kernels.gemm_loop import add_product
from tmoe.kernels.gemm_tile import tile_position
from tmoe.kernels.launch import (
    cdiv,
    fp32_precision,
    num_multiprocessors,
    pdl_options,
    supports_tma,
)
from tmoe.kernels.sort import SortedTokens


@triton.jit
def _slots(row_to_slot_ptr, rows, end_row):
    return tl.load(row_to_slot_ptr + rows, mask=rows < end_row, other=0)


@triton.jit
def _load_rows(operand, at, columns, mask):
    """[rows, columns] of an operand through pointers; what `mask`, of the rows, leaves out is 0."""
    ptr, strides, num_columns = operand
    ptrs = ptr + at.to(tl.int64)[:, None] * strides[0] + columns[None, :] * strides[1]
    return tl.load(ptrs, mask=mask[:, None] & (columns < num_columns)[None, :], other=0.0)


@triton.jit
def _add_step(acc, left_tile, right_tile, row_weight_ptr, slots, mask, PRECISION: tl.constexpr):
    """acc + left_tileᵀ · right_tile, with the rows' weights in between if there are any."""
    if row_weight_ptr is not None:
        weight = widen(tl.load(row_weight_ptr + slots, mask=mask, other=0.0)).to(tl.float32)
        weighted = widen(right_tile).to(tl.float32) * weight[:, None]
        right_tile = narrow(weighted, right_tile.dtype)
    return add_product(acc, left_tile.T, right_tile.T, None, PRECISION, False)


@triton.jit
def _gradient_tile(
    out, left, right, left_tiles, right_tiles, row_weight_ptr, row_to_slot_ptr, expert_offsets_ptr,
    top_k, index, tiles_n, tiles_d,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr,
    LEFT_IS_DESC: tl.constexpr, RIGHT_IS_DESC: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    """One tile, from its first load to its stores."""
    out_ptr, out_strides, N, D = out
    expert = index // (tiles_n * tiles_d)
    tile_n, tile_d = tile_position(index % (tiles_n * tiles_d), tiles_n, tiles_d, GROUP_N)
    first_row = tl.load(expert_offsets_ptr + expert)
    end_row = tl.load(expert_offsets_ptr + expert + 1)
    offs_s = tl.arange(0, BLOCK_S)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tile_d * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Whole steps may be copied; the slots of a step are loaded one step ahead.
    SPLIT: tl.constexpr = LEFT_IS_DESC or RIGHT_IS_DESC
    SLOTS: tl.constexpr = GATHER_LEFT or GATHER_RIGHT or row_weight_ptr is not None
    end_of_steps = end_row
    if SPLIT:
        end_of_steps = first_row + (end_row - first_row) // BLOCK_S * BLOCK_S
    slots = first_row + offs_s
    if SLOTS:
        slots = _slots(row_to_slot_ptr, first_row + offs_s, end_row)
    for row in tl.range(first_row, end_of_steps, BLOCK_S, num_stages=NUM_STAGES):
        rows = row + offs_s
        mask = rows < end_row
        if LEFT_IS_DESC:
            left_tile = left_tiles.load([row, tile_n * BLOCK_N])
        else:
            left_tile = _load_rows(left, slots // top_k if GATHER_LEFT else rows, offs_n, mask)
        if RIGHT_IS_DESC:
            right_tile = right_tiles.load([row, tile_d * BLOCK_D])
        else:
            right_tile = _load_rows(right, slots // top_k if GATHER_RIGHT else rows, offs_d, mask)
        acc = _add_step(acc, left_tile, right_tile, row_weight_ptr, slots, mask, PRECISION)
        if SLOTS:
            slots = _slots(row_to_slot_ptr, rows + BLOCK_S, end_row)
    if SPLIT:
        if end_of_steps < end_row:
            rows = end_of_steps + offs_s
            mask = rows < end_row
            left_tile = _load_rows(left, slots // top_k if GATHER_LEFT else rows, offs_n, mask)
            right_tile = _load_rows(right, slots // top_k if GATHER_RIGHT else rows, offs_d, mask)
            acc = _add_step(acc, left_tile, right_tile, row_weight_ptr, slots, mask, PRECISION)

    out_ptrs = out_ptr + expert.to(tl.int64) * out_strides[0] + offs_d[None, :] * out_strides[2]
    out_ptrs += offs_n.to(tl.int64)[:, None] * out_strides[1]
    inside = (offs_n < N)[:, None] & (offs_d < D)[None, :]
    if ACCUMULATE:
        if first_row < end_row:
            acc += widen(tl.load(out_ptrs, mask=inside, other=0.0)).to(tl.float32)
            tl.store(out_ptrs, narrow(acc, out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptrs, narrow(acc, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_experts", "top_k"])
def _weight_gradient_kernel(
    out_ptr,  # (E, N, D)  written, or added to
    left_ptr,  # (T, N) if GATHER_LEFT, else (S, N)
    right_ptr,  # (T, D) if GATHER_RIGHT, else (S, D)
    left_tiles,  # descriptor of (BLOCK_S, BLOCK_N) tiles of `left`, or None
    right_tiles,  # the same of `right`
    row_weight_ptr,  # (T·K,)  multiplied into `right`; or None
    row_to_slot_ptr,  # (S,)
    expert_offsets_ptr,  # (E+1,)
    num_experts, N, D, top_k, out_strides, left_strides, right_strides,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr,
    LEFT_IS_DESC: tl.constexpr, RIGHT_IS_DESC: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, GROUP_N: tl.constexpr,
    PERSISTENT: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (E · tiles,) or, if PERSISTENT, (multiprocessors,)."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    out = (out_ptr, out_strides, N, D)
    left, right = (left_ptr, left_strides, N), (right_ptr, right_strides, D)
    tiles_n, tiles_d = tl.cdiv(N, BLOCK_N), tl.cdiv(D, BLOCK_D)
    if PERSISTENT:
        start, step = tl.program_id(0), tl.num_programs(0)
        for index in tl.range(start, num_experts * tiles_n * tiles_d, step, flatten=True):
            _gradient_tile(
                out, left, right, left_tiles, right_tiles, row_weight_ptr, row_to_slot_ptr,
                expert_offsets_ptr, top_k, index, tiles_n, tiles_d,
                GATHER_LEFT, GATHER_RIGHT, LEFT_IS_DESC, RIGHT_IS_DESC, ACCUMULATE, PRECISION,
                NUM_STAGES, BLOCK_N, BLOCK_D, BLOCK_S, GROUP_N,
            )  # fmt: skip
    else:
        _gradient_tile(
            out, left, right, left_tiles, right_tiles, row_weight_ptr, row_to_slot_ptr,
            expert_offsets_ptr, top_k, tl.program_id(0), tiles_n, tiles_d,
            GATHER_LEFT, GATHER_RIGHT, LEFT_IS_DESC, RIGHT_IS_DESC, ACCUMULATE, PRECISION,
            NUM_STAGES, BLOCK_N, BLOCK_D, BLOCK_S, GROUP_N,
        )  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def weight_gradient(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    order: SortedTokens,
    tile: GradientTile,
    *,
    gather_left: bool = False,
    gather_right: bool = False,
    row_weight: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Write left[rows e].T @ right[rows e] of each expert e to `out` (E, N, D) and return it.

    left: (S, N) in expert order, or with `gather_left` (T, N) in token order; right: (S, D) or
    (T, D) likewise; one dtype: fp32, fp16 or bf16, any strides. out: any strides and float dtype.
    row_weight: (T·K,) contiguous, multiplied into the rows of one side, which are rounded again.
    accumulate: add to what `out` holds instead of replacing it; the sum is rounded once.
    Rows from expert_offsets[E] on are never read.
    """
    if out.stride(2) != 1 and out.stride(1) == 1:  # stored transposed: so is what is computed
        weight_gradient(
            out.transpose(1, 2), right, left, order, tile, gather_left=gather_right,
            gather_right=gather_left, row_weight=row_weight, accumulate=accumulate,
        )  # fmt: skip
        return out
    E, N, D = out.shape
    programs = E * cdiv(N, tile.block_n) * cdiv(D, tile.block_d)
    if tile.persistent:
        programs = min(programs, num_multiprocessors(out.device))
    tma = tile.copies and supports_tma(out.device)
    left_tiles = right_tiles = None
    if tma and not gather_left:
        left_tiles = describe_rows(left, tile.block_s, tile.block_n)
    if tma and not gather_right:
        right_tiles = describe_rows(right, tile.block_s, tile.block_d)
    _weight_gradient_kernel[(programs,)](
        out, left, right, left_tiles, right_tiles, row_weight,
        order.row_to_slot, order.expert_offsets, E, N, D, order.top_k,
        out.stride(), left.stride(), right.stride(),
        GATHER_LEFT=gather_left, GATHER_RIGHT=gather_right,
        LEFT_IS_DESC=left_tiles is not None, RIGHT_IS_DESC=right_tiles is not None,
        ACCUMULATE=accumulate, PRECISION=fp32_precision(), NUM_STAGES=tile.num_stages,
        BLOCK_N=tile.block_n, BLOCK_D=tile.block_d, BLOCK_S=tile.block_s, GROUP_N=tile.group_n,
        PERSISTENT=tile.persistent,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(out.device),
    )  # fmt: skip
    return out


def weight_gradient_ref(left: Tensor, right: Tensor, expert_offsets: Tensor) -> Tensor:
    """The same in torch, in the dtype of `left` (S, N) and `right` (S, D) in expert order."""
    bounds = pairwise(expert_offsets.tolist())
    return torch.stack([left[start:end].T @ right[start:end] for start, end in bounds])
