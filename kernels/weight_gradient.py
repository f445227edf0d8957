"""Weight gradient: a grouped GEMM whose contracted dimension is ragged.

    out[e, n, d] = sum_r left[r, n] · right[r, d]        r in the rows of expert e

`left` is the gradient of a projection's output, `right` its input, both in expert order
(`permute.py` brings them there). An expert without rows gets zeros.

A program owns one tile of one expert's matrix and walks along that expert's rows, BLOCK_S at a
time, in a fixed order; sums are fp32. Tiles of one expert follow each other, GROUP_N rows of tiles
going through the columns together, so that what they read is still in L2. An expert of many rows
takes longer than one of few: programs are handed out by the hardware as others end.

Where the rows can be described, whole steps read them with the copy engine. The rest of an expert's
rows, fewer than a step, come by pointers, since a copied tile would reach into the next expert's
rows or into memory that nobody wrote.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.backward_tiles import GradientTile
from tmoe.kernels.casts import INTERPRETED, narrow, widen
from tmoe.kernels.descriptors import describe_rows, describe_weights
from tmoe.kernels.gemm_loop import add_product
from tmoe.kernels.gemm_tile import tile_position
from tmoe.kernels.launch import (
    cdiv,
    fp32_precision,
    launch,
    pdl_options,
    supports_tma,
)


@triton.jit
def _load_rows(operand, rows, columns, end_row):
    """[rows, columns] of an operand through pointers; 0 from `end_row` on."""
    ptr, strides, num_columns = operand
    mask = (rows < end_row)[:, None] & (columns < num_columns)[None, :]
    ptrs = ptr + rows.to(tl.int64)[:, None] * strides[0] + columns[None, :] * strides[1]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _weight_gradient_kernel(
    out_ptr,  # (E, N, D)  written, or added to
    left_ptr,  # (S, N)
    right_ptr,  # (S, D)
    out_tiles,  # descriptor of (1, BLOCK_N, BLOCK_D) tiles of `out`, or None
    left_tiles,  # descriptor of (BLOCK_S, BLOCK_N) tiles of `left`, or None
    right_tiles,  # the same of `right`
    expert_offsets_ptr,  # (E+1,)
    N, D, out_strides, left_strides, right_strides,
    OUT_IS_DESC: tl.constexpr, ROWS_ARE_DESC: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, GROUP_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (E · tiles,)."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    left, right = (left_ptr, left_strides, N), (right_ptr, right_strides, D)
    tiles_n, tiles_d = tl.cdiv(N, BLOCK_N), tl.cdiv(D, BLOCK_D)
    index = tl.program_id(0)
    expert = index // (tiles_n * tiles_d)
    tile_n, tile_d = tile_position(index % (tiles_n * tiles_d), tiles_n, tiles_d, GROUP_N)
    first_row = tl.load(expert_offsets_ptr + expert)
    end_row = tl.load(expert_offsets_ptr + expert + 1)
    offs_s = tl.arange(0, BLOCK_S)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tile_d * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    end_of_steps = end_row
    if ROWS_ARE_DESC:
        end_of_steps = first_row + (end_row - first_row) // BLOCK_S * BLOCK_S
    for row in tl.range(first_row, end_of_steps, BLOCK_S, num_stages=NUM_STAGES):
        if ROWS_ARE_DESC:
            left_tile = left_tiles.load([row, tile_n * BLOCK_N])
            right_tile = right_tiles.load([row, tile_d * BLOCK_D])
        else:
            left_tile = _load_rows(left, row + offs_s, offs_n, end_row)
            right_tile = _load_rows(right, row + offs_s, offs_d, end_row)
        acc = add_product(acc, left_tile.T, right_tile.T, None, PRECISION, False)
    if ROWS_ARE_DESC:
        if end_of_steps < end_row:
            left_tile = _load_rows(left, end_of_steps + offs_s, offs_n, end_row)
            right_tile = _load_rows(right, end_of_steps + offs_s, offs_d, end_row)
            acc = add_product(acc, left_tile.T, right_tile.T, None, PRECISION, False)

    if OUT_IS_DESC:
        tile = narrow(acc, out_ptr.dtype.element_ty).reshape(1, BLOCK_N, BLOCK_D)
        at = [expert, tile_n * BLOCK_N, tile_d * BLOCK_D]
        if not ACCUMULATE:
            out_tiles.store(at, tile)
        elif first_row < end_row:
            if INTERPRETED:
                out_tiles.store(at, out_tiles.load(at) + tile)
            else:
                out_tiles.atomic_add(at, tile)  # nobody else adds to this tile
    else:
        out_ptrs = out_ptr + expert.to(tl.int64) * out_strides[0] + offs_d[None, :] * out_strides[2]
        out_ptrs += offs_n.to(tl.int64)[:, None] * out_strides[1]
        inside = (offs_n < N)[:, None] & (offs_d < D)[None, :]
        if ACCUMULATE:
            inside = inside & (first_row < end_row)
            acc += widen(tl.load(out_ptrs, mask=inside, other=0.0)).to(tl.float32)
        tl.store(out_ptrs, narrow(acc, out_ptr.dtype.element_ty), mask=inside)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def weight_gradient(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    expert_offsets: Tensor,
    tile: GradientTile,
    *,
    accumulate: bool = False,
) -> Tensor:
    """Write left[rows e].T @ right[rows e] of each expert e to `out` (E, N, D) and return it.

    left: (S, N), right: (S, D), in expert order; one dtype: fp32, fp16 or bf16, any strides.
    expert_offsets: (E+1,) contiguous. out: any strides and float dtype. accumulate: add to what
    `out` holds instead of replacing it; the sum is rounded once. Rows from expert_offsets[E] on are
    never read.
    """
    if out.stride(2) != 1 and out.stride(1) == 1:  # stored transposed: so is what is computed
        weight_gradient(
            out.transpose(1, 2), right, left, expert_offsets, tile, accumulate=accumulate
        )
        return out
    E, N, D = out.shape
    programs = E * cdiv(N, tile.block_n) * cdiv(D, tile.block_d)
    out_tiles = left_tiles = right_tiles = None
    if supports_tma(out.device):
        left_tiles = describe_rows(left, tile.block_s, tile.block_n)
        right_tiles = describe_rows(right, tile.block_s, tile.block_d)
        # Added by the copy engine, 16 bits would be rounded twice.
        if tile.copies_out and (not accumulate or out.dtype == torch.float32):
            out_tiles = describe_weights(out, tile.block_n, tile.block_d, halves=False)
    described = left_tiles is not None and right_tiles is not None
    launch(
        _weight_gradient_kernel, (programs,),
        out, left, right, out_tiles, *((left_tiles, right_tiles) if described else (None, None)),
        expert_offsets, N, D, out.stride(), left.stride(), right.stride(),
        OUT_IS_DESC=out_tiles is not None, ROWS_ARE_DESC=described,
        ACCUMULATE=accumulate, PRECISION=fp32_precision(), NUM_STAGES=tile.num_stages,
        BLOCK_N=tile.block_n, BLOCK_D=tile.block_d, BLOCK_S=tile.block_s, GROUP_N=tile.group_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(out.device),
    )  # fmt: skip
    return out


def weight_gradient_ref(left: Tensor, right: Tensor, expert_offsets: Tensor) -> Tensor:
    """The same in torch, in the dtype of `left` (S, N) and `right` (S, D) in expert order."""
    bounds = pairwise(expert_offsets.tolist())
    return torch.stack([left[start:end].T @ right[start:end] for start, end in bounds])
