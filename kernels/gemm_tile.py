"""What a grouped GEMM does around its sums: which tile is whose, and how a product is stored.

A row tile is (expert, first row, end row), made by `sort.py`; a column tile is a number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tmoe.kernels.activation import activate, activate_gated
from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.rounding import e4m3_codes


@triton.jit
def tile_position(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row tile, column tile): GROUP_M row tiles go through the columns together, so that weights
    are still in L2 for the next row tile."""
    per_group = GROUP_M * tiles_n
    first_m = (index // per_group) * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    within = index % per_group
    return first_m + within % height, within // height


@triton.jit
def load_tile(tiles_ptr, tile_m):
    """(expert, first row, end row)"""
    ptr = tiles_ptr + 3 * tile_m
    return tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2)


@triton.jit
def weight_rows(
    tile_n, column, N,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The rows of an expert's weights by which the tile's columns `column` are multiplied: of a
    gated projection first BLOCK_N gate rows, then their up rows. Row 0 for a column past N."""
    if GATED and not INTERLEAVED:
        n = tile_n * BLOCK_N + column % BLOCK_N
        return tl.where(n < N, n, 0) + (column // BLOCK_N) * N
    else:
        rows_per_column: tl.constexpr = 2 if GATED else 1
        n = tile_n * BLOCK_N * rows_per_column + column
        return tl.where(n < N * rows_per_column, n, 0)


@triton.jit
def _load_bias(bias_ptr, bias_strides, expert, columns, inside):
    ptrs = bias_ptr + expert.to(tl.int64) * bias_strides[0] + columns * bias_strides[1]
    return widen(tl.load(ptrs, mask=inside, other=0.0)).to(tl.float32)[None, :]


@triton.jit
def _store_rows(ptr, rows, columns, stride, mask, values):
    """fp32 `values`, or codes, as what `ptr` points to."""
    ptrs = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if values.dtype == tl.float32:
        values = narrow(values, ptr.dtype.element_ty)
    tl.store(ptrs, values, mask=mask)


@triton.jit
def finish_tile(
    problem, acc, expert, rows, in_expert, slots, tile_n,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROW_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """From the product [BLOCK_M, COLUMNS] in fp32 to the stored rows: weight, bias, activation, and
    where the rows' format has a static scale also quantisation."""
    out_ptr, before_ptr, out_scale_ptr, bias_ptr, row_weight_ptr, N, alpha, limit = problem[0]
    stride_out, stride_before, stride_scale, bias_strides = problem[1]
    if ROW_WEIGHT != "none":
        row_weight = tl.load(row_weight_ptr + slots, mask=in_expert, other=0.0)
        row_weight = widen(row_weight).to(tl.float32)[:, None]
    if ROW_WEIGHT == "input":  # (weight · a) @ w, before bias and activation
        acc *= row_weight
    if before_ptr is not None:  # all columns at once, in the order of the sums, then no bias left
        COLUMNS: tl.constexpr = BLOCK_N * (2 if GATED else 1)
        column = tl.arange(0, COLUMNS)
        if GATED and not INTERLEAVED:
            inside_n = tile_n * BLOCK_N + column % BLOCK_N < N
            column = tile_n * BLOCK_N + column % BLOCK_N + (column // BLOCK_N) * N
        else:
            column = tile_n * COLUMNS + column
            inside_n = column < N * (COLUMNS // BLOCK_N)
        if bias_ptr is not None:
            acc += _load_bias(bias_ptr, bias_strides, expert, column, inside_n)
        inside = in_expert[:, None] & inside_n[None, :]
        _store_rows(before_ptr, rows, column, stride_before, inside, acc)
        bias_ptr = None
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        if INTERLEAVED:
            gate, up = tl.split(acc.reshape(BLOCK_M, BLOCK_N, 2))
        else:
            gate, up = tl.split(acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1))
        if bias_ptr is not None:
            gate_column = 2 * offs_n if INTERLEAVED else offs_n
            up_column = gate_column + (1 if INTERLEAVED else N)
            gate += _load_bias(bias_ptr, bias_strides, expert, gate_column, gate_column < 2 * N)
            up += _load_bias(bias_ptr, bias_strides, expert, up_column, up_column < 2 * N)
        y = activate_gated(gate, up, alpha, limit, ACTIVATION)
    else:
        if bias_ptr is not None:
            acc += _load_bias(bias_ptr, bias_strides, expert, offs_n, offs_n < N)
        y = activate(acc, ACTIVATION)
    if ROW_WEIGHT == "output":
        y *= row_weight
    if out_scale_ptr is not None:  # e4m3 codes of the fp32 numbers, as `quantize_fp8` makes them
        scale = tl.load(out_scale_ptr + expert * stride_scale)
        y = e4m3_codes(y, scale)
    _store_rows(out_ptr, rows, offs_n, stride_out, in_expert[:, None] & (offs_n < N)[None, :], y)
