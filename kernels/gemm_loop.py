"""The loop of a grouped GEMM over the depth: all of one tile, from its first load to its stores.

Numbers, codes and scales are loaded step by step and multiplied as `weight_codes.py` says; where a
tile is, and what happens to its sums, is in `gemm_tile.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tmoe.kernels.casts import widen
from tmoe.kernels.e2m1_pairs import in_thread_order
from tmoe.kernels.gemm_tile import finish_tile, weight_rows
from tmoe.kernels.low_rank import add_low_rank
from tmoe.kernels.weight_codes import (
    PLAIN_CODES,
    add_block_scaled,
    apply_whole_scales,
    block_factor,
    load_a_scales,
    load_fine_scales,
    numbers,
)


@triton.jit
def add_product(acc, a, w, factor, PRECISION: tl.constexpr, NARROW: tl.constexpr):
    """acc + (a · wᵀ) · factor, or without a factor; all of it transposed if NARROW."""
    a, w = widen(a), widen(w)
    left = w if NARROW else a
    right = a.T if NARROW else w.T
    if factor is not None:
        return tl.fma(tl.dot(left, right, input_precision=PRECISION), factor, acc)
    elif PRECISION == "ieee" and left.dtype == tl.float32:
        # One chain of D additions would lose digits, so every step is summed by itself. An fma,
        # since the compiler would merge a plain addition into the dot.
        return tl.fma(tl.dot(left, right, input_precision=PRECISION), 1.0, acc)
    else:
        return tl.dot(left, right, acc, input_precision=PRECISION)


@triton.jit
def compute_tile(
    operands, problem, scales, adapter, a, tile, tile_n,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    GATHER: tl.constexpr, ROW_WEIGHT: tl.constexpr, CODES: tl.constexpr,
    A_IS_DESC: tl.constexpr, W_IS_DESC: tl.constexpr, D_IS_LAST: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """All rows of one row tile, which has room for BLOCK_M, and the columns of one column tile."""
    expert, first_row, end_row = tile
    row_to_slot_ptr, w, N, D, top_k, a_strides, w_strides = operands
    COLUMNS: tl.constexpr = BLOCK_N * (2 if GATED else 1)  # weight rows that the tile multiplies by
    PER_BYTE: tl.constexpr = 2 if CODES.packed else 1
    A_PER_BYTE: tl.constexpr = 2 if CODES.a_packed else 1
    BLOCK_W: tl.constexpr = BLOCK_D // PER_BYTE
    BLOCK_A: tl.constexpr = BLOCK_D // A_PER_BYTE
    FINE: tl.constexpr = CODES.is_fine
    BLOCKWISE: tl.constexpr = CODES.is_blockwise
    tl.static_assert(BLOCK_D <= 128 or not BLOCKWISE, "a step has one scale")
    # The weights are the left operand where rows are too few for it, and where their codes become
    # numbers for a warp's instructions, which take them from the registers that they are in.
    IN_THREAD_ORDER: tl.constexpr = CODES.in_pairs and BLOCK_M < 64
    NARROW: tl.constexpr = BLOCK_M < 16 or IN_THREAD_ORDER
    # Scales are loaded a step ahead, but not where that costs a detour of all numbers through
    # shared memory; with many rows they take it anyway.
    AHEAD: tl.constexpr = (BLOCK_M >= 64 or IN_THREAD_ORDER) and not CODES.block_scaled
    rows = first_row + tl.arange(0, BLOCK_M)
    in_expert = rows < end_row
    # Rows past the expert's end and columns past N are computed from valid ones, never stored.
    valid_rows = tl.where(in_expert, rows, first_row)
    slots = valid_rows
    if row_to_slot_ptr is not None and (GATHER or ROW_WEIGHT != "none"):
        slots = tl.load(row_to_slot_ptr + rows, mask=in_expert, other=0)
    a_rows = slots // top_k if GATHER else valid_rows
    w_rows = weight_rows(tile_n, tl.arange(0, COLUMNS), N, GATED, INTERLEAVED, BLOCK_N)
    offs_a, offs_w = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_W)
    if not A_IS_DESC:
        a_ptrs = a + a_rows.to(tl.int64)[:, None] * a_strides[0] + offs_a[None, :] * a_strides[1]
    if not W_IS_DESC:
        w_ptrs = w + expert.to(tl.int64) * w_strides[0] + offs_w[None, :] * w_strides[2]
        w_ptrs += w_rows.to(tl.int64)[:, None] * w_strides[1]
    if FINE and AHEAD:
        next_scale = load_fine_scales(scales, expert, w_rows, 0, D, CODES, BLOCK_D, IN_THREAD_ORDER)

    acc = tl.zeros((COLUMNS if NARROW else BLOCK_M, BLOCK_M if NARROW else COLUMNS), tl.float32)
    for d in tl.range(0, D, BLOCK_D, num_stages=NUM_STAGES):
        if A_IS_DESC:
            a_tile = a.load([first_row, d // A_PER_BYTE])
        elif EVEN_D:
            a_tile = tl.load(a_ptrs, mask=in_expert[:, None], other=0.0)
        else:
            in_depth = offs_a < (D - d) // A_PER_BYTE
            a_tile = tl.load(a_ptrs, mask=in_expert[:, None] & in_depth[None, :], other=0.0)
        if W_IS_DESC:
            if D_IS_LAST and GATED and not INTERLEAVED:
                w_tile = w.load([expert, 0, tile_n * BLOCK_N, d // PER_BYTE])
                w_tile = w_tile.reshape(COLUMNS, BLOCK_W)
            elif D_IS_LAST:
                w_tile = w.load([expert, tile_n * COLUMNS, d // PER_BYTE])
                w_tile = w_tile.reshape(COLUMNS, BLOCK_W)
            elif GATED and not INTERLEAVED:
                w_tile = w.load([expert, d, 0, tile_n * BLOCK_N]).reshape(BLOCK_D, COLUMNS).T
            else:
                w_tile = w.load([expert, d, tile_n * COLUMNS]).reshape(BLOCK_D, COLUMNS).T
        elif EVEN_D:
            w_tile = tl.load(w_ptrs)
        else:
            w_tile = tl.load(w_ptrs, mask=offs_w[None, :] < (D - d) // PER_BYTE, other=0.0)
        if not A_IS_DESC:
            a_ptrs += BLOCK_A * a_strides[1]
        if not W_IS_DESC:
            w_ptrs += BLOCK_W * w_strides[2]

        w_scale = None
        if FINE and AHEAD:
            w_scale = next_scale
            next_scale = load_fine_scales(
                scales, expert, w_rows, d + BLOCK_D, D, CODES, BLOCK_D, IN_THREAD_ORDER
            )
        elif FINE:
            w_scale = load_fine_scales(
                scales, expert, w_rows, d, D, CODES, BLOCK_D, IN_THREAD_ORDER
            )
        if CODES.block_scaled:
            a_scale = load_a_scales(scales, a_rows, d, D, CODES, BLOCK_D)
            acc = add_block_scaled(acc, a_tile, a_scale, w_tile, w_scale, CODES)
        else:
            if a_tile.dtype == tl.uint8:  # codes, on a GPU that doesn't multiply them
                a_tile = numbers(a_tile, None, PLAIN_CODES, tl.bfloat16)
            if w_tile.dtype == tl.uint8:
                w_tile = numbers(w_tile, w_scale, CODES, a_tile.dtype, IN_THREAD_ORDER)
            if IN_THREAD_ORDER:
                a_tile = in_thread_order(a_tile)
            factor = None
            if BLOCKWISE:
                factor = block_factor(
                    scales, expert, a_rows, w_rows, d // 128, tile_n, N,
                    CODES, GATED, INTERLEAVED, NARROW, BLOCK_N,
                )  # fmt: skip
            acc = add_product(acc, a_tile, w_tile, factor, PRECISION, NARROW)

    if NARROW:
        acc = acc.T
    acc = apply_whole_scales(scales, acc, expert, a_rows, w_rows, N * (COLUMNS // BLOCK_N), CODES)
    if adapter[0] is not None:
        acc = add_low_rank(
            adapter, acc, expert, rows, in_expert, w_rows, PRECISION, BLOCK_M, BLOCK_R
        )
    finish_tile(
        problem, acc, expert, rows, in_expert, slots, tile_n,
        ACTIVATION, GATED, INTERLEAVED, ROW_WEIGHT, BLOCK_M, BLOCK_N,
    )  # fmt: skip
