"""Grouped GEMM: every expert's rows times that expert's weights, in one launch.

    y[r, n] = act(sum_d a[r, d] · w[e, n, d] + bias[e, n])          r in the rows of expert e

Rows stand in expert order and are cut into tiles of BLOCK_M (`sort.py`). One kernel serves both
projections of a layer:

    gate_up   a[r] is x[row_to_slot[r] // top_k], gathered on the way in: x is never permuted.
              A tile multiplies by its gate and its up columns in one dot of 2·BLOCK_N columns and
              activates the result before it stores: the (S, 2I) product never reaches memory.
    down      the routing weight is applied in fp32 before the row's one rounding.

Sums run in fp32 along D in steps of BLOCK_D, so a row's bits depend on the tile, not on the rows
beside it. S rows, E experts, N output columns, D depth (contracted).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.activation import activate, activate_gated
from tmoe.kernels.activation_ref import activate_ref
from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.descriptors import describe_rows, describe_weights
from tmoe.kernels.launch import (
    cdiv,
    fp32_precision,
    num_multiprocessors,
    pdl_options,
    supports_tma,
)
from tmoe.kernels.sort import SortedTokens
from tmoe.kernels.tiles import Tile


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
def _load_bias(bias_ptr, bias_strides, expert, columns, num_columns):
    ptrs = bias_ptr + expert.to(tl.int64) * bias_strides[0] + columns * bias_strides[1]
    return widen(tl.load(ptrs, mask=columns < num_columns, other=0.0)).to(tl.float32)[None, :]


@triton.jit
def load_tile(tiles_ptr, tile_m):
    """(expert, first row, end row)"""
    ptr = tiles_ptr + 3 * tile_m
    return tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2)


@triton.jit
def finish_tile(
    problem, acc, expert, rows, in_expert, slots, tile_n,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROW_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """From the product [BLOCK_M, COLUMNS] in fp32 to the stored rows: weight, bias, activation."""
    out_ptr, _w, bias_ptr, row_weight_ptr, _row_to_slot_ptr, N, _D, _top_k, alpha, limit = problem[
        0
    ]
    stride_out, _a_strides, _w_strides, bias_strides = problem[1]
    if ROW_WEIGHT != "none":
        row_weight = tl.load(row_weight_ptr + slots, mask=in_expert, other=0.0)
        row_weight = widen(row_weight).to(tl.float32)[:, None]
    if ROW_WEIGHT == "input":  # (weight · a) @ w, before bias and activation
        acc *= row_weight
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        if INTERLEAVED:
            gate, up = tl.split(acc.reshape(BLOCK_M, BLOCK_N, 2))
        else:
            gate, up = tl.split(acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1))
        if bias_ptr is not None:
            gate_column = 2 * offs_n if INTERLEAVED else offs_n
            up_column = gate_column + (1 if INTERLEAVED else N)
            gate += _load_bias(bias_ptr, bias_strides, expert, gate_column, 2 * N)
            up += _load_bias(bias_ptr, bias_strides, expert, up_column, 2 * N)
        y = activate_gated(gate, up, alpha, limit, ACTIVATION)
    else:
        if bias_ptr is not None:
            acc += _load_bias(bias_ptr, bias_strides, expert, offs_n, N)
        y = activate(acc, ACTIVATION)
    if ROW_WEIGHT == "output":
        y *= row_weight
    y = narrow(y, out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + offs_n[None, :]
    tl.store(out_ptrs, y, mask=in_expert[:, None] & (offs_n < N)[None, :])


@triton.jit
def _compute_tile(
    problem, a, tile, tile_n,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    GATHER: tl.constexpr, ROW_WEIGHT: tl.constexpr,
    A_IS_DESC: tl.constexpr, W_IS_DESC: tl.constexpr, D_IS_LAST: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All rows of one row tile, which has room for BLOCK_M, and the columns of one column tile."""
    expert, first_row, end_row = tile
    out_ptr, w, bias_ptr, row_weight_ptr, row_to_slot_ptr, N, D, top_k, alpha, limit = problem[0]
    stride_out, a_strides, w_strides, bias_strides = problem[1]
    COLUMNS: tl.constexpr = BLOCK_N * (2 if GATED else 1)  # weight rows that the tile multiplies by
    rows = first_row + tl.arange(0, BLOCK_M)
    in_expert = rows < end_row
    offs_d = tl.arange(0, BLOCK_D)
    slots = rows
    if GATHER or ROW_WEIGHT != "none":
        slots = tl.load(row_to_slot_ptr + rows, mask=in_expert, other=0)

    # Rows past the expert's end and columns past N are computed from a valid row, never stored.
    if not A_IS_DESC:
        a_rows = slots // top_k if GATHER else tl.where(in_expert, rows, first_row)
        a_ptrs = a + a_rows.to(tl.int64)[:, None] * a_strides[0] + offs_d[None, :] * a_strides[1]
    if not W_IS_DESC:
        column = tl.arange(0, COLUMNS)
        if GATED and not INTERLEAVED:
            n = tile_n * BLOCK_N + column % BLOCK_N
            w_rows = tl.where(n < N, n, 0) + (column // BLOCK_N) * N
        else:
            n = tile_n * COLUMNS + column
            w_rows = tl.where(n < N * (COLUMNS // BLOCK_N), n, 0)
        w_ptrs = (
            w + expert.to(tl.int64) * w_strides[0] + w_rows.to(tl.int64)[None, :] * w_strides[1]
        )
        w_ptrs += offs_d[:, None] * w_strides[2]

    acc = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for d in tl.range(0, D, BLOCK_D, num_stages=NUM_STAGES):
        if A_IS_DESC:
            a_tile = a.load([first_row, d])
        elif EVEN_D:
            a_tile = tl.load(a_ptrs)
        else:
            a_tile = tl.load(a_ptrs, mask=offs_d[None, :] < D - d, other=0.0)
        if W_IS_DESC:
            if D_IS_LAST and GATED and not INTERLEAVED:
                w_tile = w.load([expert, 0, tile_n * BLOCK_N, d]).reshape(COLUMNS, BLOCK_D).T
            elif D_IS_LAST:
                w_tile = w.load([expert, tile_n * COLUMNS, d]).reshape(COLUMNS, BLOCK_D).T
            elif GATED and not INTERLEAVED:
                w_tile = w.load([expert, d, 0, tile_n * BLOCK_N]).reshape(BLOCK_D, COLUMNS)
            else:
                w_tile = w.load([expert, d, tile_n * COLUMNS]).reshape(BLOCK_D, COLUMNS)
        elif EVEN_D:
            w_tile = tl.load(w_ptrs)
        else:
            w_tile = tl.load(w_ptrs, mask=offs_d[:, None] < D - d, other=0.0)
        a_tile, w_tile = widen(a_tile), widen(w_tile)
        if PRECISION == "ieee" and a_tile.dtype == tl.float32:
            # One chain of D additions would lose digits, so every step is summed by itself. An fma,
            # since the compiler would merge a plain addition into the dot.
            acc = tl.fma(tl.dot(a_tile, w_tile, input_precision=PRECISION), 1.0, acc)
        else:
            acc = tl.dot(a_tile, w_tile, acc, input_precision=PRECISION)
        if not A_IS_DESC:
            a_ptrs += BLOCK_D * a_strides[1]
        if not W_IS_DESC:
            w_ptrs += BLOCK_D * w_strides[2]

    finish_tile(
        problem, acc, expert, rows, in_expert, slots, tile_n,
        ACTIVATION, GATED, INTERLEAVED, ROW_WEIGHT, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_tiles", "top_k", "alpha", "limit"])
def _grouped_gemm_kernel(
    out_ptr,  # (S, N)  written
    a,  # (T, D) if GATHER, else (S, D): pointer, or descriptor of (BLOCK_M, BLOCK_D) tiles
    a_half,  # the same with tiles of BLOCK_M // 2 rows
    w,  # (E, N, D); GATED: (E, 2N, D): pointer, or descriptor of tiles
    bias_ptr,  # (E, N); GATED: (E, 2N); or None
    row_weight_ptr,  # (T·K,)  routing weight of each slot; or None
    row_to_slot_ptr,  # (S,)
    tiles_ptr,  # (max_tiles, 3)  expert, first row, end row
    num_tiles_ptr,  # (1,)
    max_tiles, N, D, top_k, stride_out, a_strides, w_strides, bias_strides, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    GATHER: tl.constexpr, ROW_WEIGHT: tl.constexpr,  # "none", on the "input" or on the "output"
    A_IS_DESC: tl.constexpr, W_IS_DESC: tl.constexpr, D_IS_LAST: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP_M: tl.constexpr, HALVE_TAILS: tl.constexpr, PERSISTENT: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles,) or, if PERSISTENT, (multiprocessors,). A program takes tile after tile.

    HALVE_TAILS: an expert's last tile has half the height when that is enough for its rows.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    problem = (
        (out_ptr, w, bias_ptr, row_weight_ptr, row_to_slot_ptr, N, D, top_k, alpha, limit),
        (stride_out, a_strides, w_strides, bias_strides),
    )
    num_tiles = tl.load(num_tiles_ptr)
    tiles_n = tl.cdiv(N, BLOCK_N)
    if PERSISTENT:
        start, step = tl.program_id(0), tl.num_programs(0)
        for index in tl.range(start, num_tiles * tiles_n, step, flatten=True):
            tile_m, tile_n = tile_position(index, num_tiles, tiles_n, GROUP_M)
            tile = load_tile(tiles_ptr, tile_m)
            _compute_tile(
                problem, a, tile, tile_n, ACTIVATION, GATED, INTERLEAVED, GATHER, ROW_WEIGHT,
                A_IS_DESC, W_IS_DESC, D_IS_LAST, EVEN_D, PRECISION, NUM_STAGES,
                BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    else:
        # In the order that max_tiles would have, so that no load has to wait for num_tiles.
        tile_m, tile_n = tile_position(tl.program_id(0), max_tiles, tiles_n, GROUP_M)
        tile = load_tile(tiles_ptr, tile_m)
        if HALVE_TAILS and tile_m < num_tiles and tile[2] - tile[1] <= BLOCK_M // 2:
            _compute_tile(
                problem, a_half, tile, tile_n, ACTIVATION, GATED, INTERLEAVED, GATHER, ROW_WEIGHT,
                A_IS_DESC, W_IS_DESC, D_IS_LAST, EVEN_D, PRECISION, NUM_STAGES,
                BLOCK_M // 2, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        elif tile_m < num_tiles:
            _compute_tile(
                problem, a, tile, tile_n, ACTIVATION, GATED, INTERLEAVED, GATHER, ROW_WEIGHT,
                A_IS_DESC, W_IS_DESC, D_IS_LAST, EVEN_D, PRECISION, NUM_STAGES,
                BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def grouped_gemm(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    order: SortedTokens,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
    weight_on_input: bool = False,
    gather: bool = False,
    activation: str = "identity",
    gated: bool = False,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float = math.inf,
) -> Tensor:
    """Write act(a @ w[e].T + bias[e]) for the rows of each expert e to `out` (S, N) and return it.

    a: (S, D) in expert order, or with `gather` (T, D) in token order. w: (E, N, D), if `gated`
    (E, 2N, D) with the up rows after the gate rows or, `interleaved`, row by row. bias: (E, N) or
    (E, 2N). row_weight: (T·K,) contiguous, multiplied into the result, or with `weight_on_input`
    into a. `out` has unit column stride; a, w and out share one dtype: fp32, fp16 or bf16. Rows
    from expert_offsets[E] on are not written.
    """
    N, D = out.shape[1], w.shape[2]
    max_tiles = order.tiles.shape[0]
    programs = max_tiles * cdiv(N, tile.block_n)
    if programs == 0:
        return out
    if tile.persistent:
        programs = min(programs, num_multiprocessors(out.device))
    tma = supports_tma(out.device)
    w_tiles = describe_weights(w, tile, gated=gated, interleaved=interleaved) if tma else None
    a_tiles = describe_rows(a, tile.block_m, tile.block_d) if tma and not gather else None
    a_halves = a_tiles
    if a_tiles is not None and tile.halves_tails:
        a_halves = describe_rows(a, tile.block_m // 2, tile.block_d)
    _grouped_gemm_kernel[(programs,)](
        out, a_tiles or a, a_halves or a, w_tiles or w,
        bias, row_weight, order.row_to_slot, order.tiles, order.num_tiles,
        max_tiles, N, D, order.top_k, out.stride(0), a.stride(), w.stride(),
        (0, 0) if bias is None else bias.stride(), alpha, limit,
        ACTIVATION=activation, GATED=gated, INTERLEAVED=interleaved, GATHER=gather,
        ROW_WEIGHT="none" if row_weight is None else "input" if weight_on_input else "output",
        A_IS_DESC=a_tiles is not None, W_IS_DESC=w_tiles is not None, D_IS_LAST=w.stride(2) == 1,
        EVEN_D=D % tile.block_d == 0,
        PRECISION=fp32_precision(),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=tile.block_d, GROUP_M=tile.group_m,
        HALVE_TAILS=tile.halves_tails, PERSISTENT=tile.persistent, NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(out.device),
    )  # fmt: skip
    return out


def grouped_gemm_ref(
    a: Tensor,
    w: Tensor,
    expert_offsets: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "identity",
    gated: bool = False,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float = math.inf,
) -> Tensor:
    """The same in torch, in the dtype of `a` (S, D) in expert order; rows of no expert are 0."""
    N = w.shape[1] // (2 if gated else 1)
    out = a.new_zeros(a.shape[0], N)
    bounds = expert_offsets.tolist()
    for e, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        y = a[start:end] @ w[e].T.to(a.dtype)
        if bias is not None:
            y = y + bias[e].to(a.dtype)
        gate, up = (y[:, 0::2], y[:, 1::2]) if interleaved else (y[:, :N], y[:, N:])
        halves = (gate, up) if gated else (y,)
        out[start:end] = activate_ref(*halves, name=activation, alpha=alpha, limit=limit)
    return out
