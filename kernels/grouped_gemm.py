"""Grouped GEMM: every expert's rows times that expert's weights, in one launch.

    y[r, n] = act(sum_d a[r, d] · w[e, n, d] + bias[e, n])          r in the rows of expert e

Rows stand in expert order and are cut into tiles of BLOCK_M (`sort.py`). One kernel serves both
projections of a layer:

    gate_up   a[r] is x[row_to_slot[r] // top_k], gathered on the way in: x is never permuted.
              A tile multiplies by its gate and its up columns in one dot of 2·BLOCK_N columns and
              activates the result before it stores: the (S, 2I) product never reaches memory.
    down      the routing weight is applied in fp32 before the row's one rounding.

Weights, and rows too, may be codes with scales. What the matmul units know is multiplied as it is:
e4m3 times e4m3, or block-scaled codes together with their scales; other codes become numbers of a's
type after they are loaded (`weight_codes.py`).

Sums run in fp32 along D in steps of BLOCK_D, so a row's bits depend on the tile, not on the rows
beside it. S rows, E experts, N output columns, D depth (contracted).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.activation_ref import activate_ref
from tmoe.kernels.descriptors import describe_rows, describe_weights
from tmoe.kernels.gemm_loop import compute_tile
from tmoe.kernels.gemm_tile import load_tile, tile_position
from tmoe.kernels.launch import (
    TRITON_IS_KNOWN,
    cdiv,
    fp32_precision,
    launch,
    multiplies_fp8,
    num_multiprocessors,
    pdl_options,
    supports_tma,
)
from tmoe.kernels.low_rank import NO_ARGUMENTS, LowRankRows
from tmoe.kernels.sort import OneToken, SortedTokens, token_expert
from tmoe.kernels.tiles import Tile
from tmoe.kernels.weight_codes import PLAIN, Scales

if TRITON_IS_KNOWN:
    from tmoe.kernels.fp8_blocks import fp8_blocks_gemm


@triton.jit(do_not_specialize=["max_tiles", "top_k", "alpha", "limit"])
def _grouped_gemm_kernel(
    out_ptr,  # (S, N)  written
    before_ptr,  # (S, N); GATED: (S, 2N)  written: what is activated; or None
    a,  # (T, D) if GATHER, else (S, D): pointer, or descriptor of (BLOCK_M, BLOCK_D) tiles
    a_half,  # the same with tiles of BLOCK_M // 2 rows
    w,  # (E, N, D); GATED: (E, 2N, D); packed: D / 2 bytes: pointer, or descriptor of tiles
    a_scale_ptr,  # (1,), (rows of a,) or (rows of a, cdiv(D, 128)) fp32; or None
    w_scale_ptr,  # (E, …), one for some rows and columns of w; or None
    w_global_ptr,  # (E, halves) fp32, or None
    a_blocks_ptr,  # (rows of a, …), as w_scale, or None
    out_scale_ptr,  # fp32, one or (E,): `out` receives e4m3 codes under it; or None
    bias_ptr,  # (E, N); GATED: (E, 2N); or None
    row_weight_ptr,  # (T·K,)  routing weight of each slot; or None
    low_ptr,  # (S, R)  rows times an adapter's first factor; or None
    up_ptr,  # (E, N, R); GATED: (E, 2N, R)  its second factor; or None
    row_to_slot_ptr,  # (S,), or None
    tiles_ptr,  # (max_tiles, 3)  expert, first row, end row; or None
    num_tiles_ptr,  # (1,), or None
    token,  # of `token_expert` instead of these three, if rows are the slots of one; or None
    max_tiles, top_k, N, D, stride_out, stride_before, a_strides, w_strides,
    a_scale_strides, w_scale_strides, w_global_strides, a_blocks_strides,
    stride_out_scale, bias_strides, R, stride_low, up_strides, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    GATHER: tl.constexpr, ROW_WEIGHT: tl.constexpr,  # "none", on the "input" or on the "output"
    CODES: tl.constexpr,  # what w and a are, if they are codes: `Codes`
    A_IS_DESC: tl.constexpr, W_IS_DESC: tl.constexpr, D_IS_LAST: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr, HALVE_TAILS: tl.constexpr, PERSISTENT: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles,) or, if PERSISTENT, (multiprocessors,). A program takes tile after tile.

    HALVE_TAILS: an expert's last tile has half the height when that is enough for its rows.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    operands = (row_to_slot_ptr, w, N, D, top_k, a_strides, w_strides)
    problem = (
        (out_ptr, before_ptr, out_scale_ptr, bias_ptr, row_weight_ptr, N, alpha, limit),
        (stride_out, stride_before, stride_out_scale, bias_strides),
    )
    scales = (
        a_scale_ptr, w_scale_ptr, w_global_ptr, a_scale_strides, w_scale_strides, w_global_strides,
        a_blocks_ptr, a_blocks_strides,
    )  # fmt: skip
    adapter = (low_ptr, up_ptr, R, stride_low, up_strides)
    if token is None:
        num_tiles = tl.load(num_tiles_ptr)
    tiles_n = tl.cdiv(N, BLOCK_N)
    if PERSISTENT:
        start, step = tl.program_id(0), tl.num_programs(0)
        for index in tl.range(start, num_tiles * tiles_n, step, flatten=True):
            tile_m, tile_n = tile_position(index, num_tiles, tiles_n, GROUP_M)
            tile = load_tile(tiles_ptr, tile_m)
            compute_tile(
                operands, problem, scales, adapter, a, tile, tile_n,
                ACTIVATION, GATED, INTERLEAVED, GATHER, ROW_WEIGHT, CODES,
                A_IS_DESC, W_IS_DESC, D_IS_LAST, EVEN_D, PRECISION, NUM_STAGES,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_R,
            )  # fmt: skip
    else:
        # In the order that max_tiles would have, so that no load has to wait for num_tiles.
        tile_m, tile_n = tile_position(tl.program_id(0), max_tiles, tiles_n, GROUP_M)
        if token is None:
            tile, is_tile = load_tile(tiles_ptr, tile_m), tile_m < num_tiles
        else:
            expert, is_tile = token_expert(token, tile_m)
            tile = (expert, tile_m, tile_m + 1)
        if HALVE_TAILS and is_tile and tile[2] - tile[1] <= BLOCK_M // 2:
            compute_tile(
                operands, problem, scales, adapter, a_half, tile, tile_n,
                ACTIVATION, GATED, INTERLEAVED, GATHER, ROW_WEIGHT, CODES,
                A_IS_DESC, W_IS_DESC, D_IS_LAST, EVEN_D, PRECISION, NUM_STAGES,
                BLOCK_M // 2, BLOCK_N, BLOCK_D, BLOCK_R,
            )  # fmt: skip
        elif is_tile:
            compute_tile(
                operands, problem, scales, adapter, a, tile, tile_n,
                ACTIVATION, GATED, INTERLEAVED, GATHER, ROW_WEIGHT, CODES,
                A_IS_DESC, W_IS_DESC, D_IS_LAST, EVEN_D, PRECISION, NUM_STAGES,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_R,
            )  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def grouped_gemm(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    order: SortedTokens | OneToken,
    tile: Tile,
    *,
    scales: Scales = PLAIN,
    before: Tensor | None = None,
    bias: Tensor | None = None,
    adapter: LowRankRows | None = None,
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

    a: (S, D) in that order, or with `gather` (T, D) in token order. w: (E, N, D), if `gated`
    (E, 2N, D) with the up rows after the gate rows or, `interleaved`, row by row. bias: (E, N) or
    (E, 2N). row_weight: (T·K,) contiguous, multiplied into the result, or with `weight_on_input`
    into a. `out` has unit column stride; a, w and out share one dtype: fp32, fp16 or bf16. Rows
    from expert_offsets[E] on are not written. before: receives what is activated, for a backward:
    (S, N) or (S, 2N), columns in the order of w's rows, unit column stride, any float dtype.
    adapter: joins the product before bias and routing weight.

    With `scales`, w holds codes: float8_e4m3fn, or packed uint8 (E, N, D / 2). Then a is bf16, fp32
    or, if w is, float8_e4m3fn, and `out` of any float dtype. With scales of a's blocks a holds
    codes too, perhaps packed (S, D / 2); a GPU with block-scaled matmul units is needed. With
    scales of the result `out` is float8_e4m3fn. A specialised tile is for what `fp8_blocks_gemm`
    takes. One token needs a tile that is neither that nor persistent.
    """
    if tile.specialized:
        assert isinstance(order, SortedTokens) and adapter is None and before is None
        return fp8_blocks_gemm(
            out, a, w, order, tile, scales, bias=bias, row_weight=row_weight,
            activation=activation, gated=gated, interleaved=interleaved, alpha=alpha, limit=limit,
        )  # fmt: skip
    N, D = out.shape[1], a.shape[1] * (2 if scales.a_packed else 1)
    programs = order.most_tiles * cdiv(N, tile.block_n)
    if programs == 0:
        return out
    columns = tile.block_n * (2 if gated else 1)
    if tile.persistent:
        assert isinstance(order, SortedTokens)
        programs = min(programs, num_multiprocessors(out.device))
    if scales.weight is not None and scales.row_blocks is None:
        if a.dtype != w.dtype or not multiplies_fp8(out.device):
            w = w.view(torch.uint8)  # codes to be decoded
            a = a.view(torch.uint8) if a.dtype == torch.float8_e4m3fn else a
    block_w = tile.block_d // (2 if scales.packed else 1)
    block_a = tile.block_d // (2 if scales.a_packed else 1)
    halves = gated and not interleaved
    tma = supports_tma(out.device)
    w_tiles = describe_weights(w, columns, block_w, halves=halves) if tma else None
    a_tiles = describe_rows(a, tile.block_m, block_a) if tma and not gather else None
    a_halves = a_tiles
    if a_tiles is not None and tile.halves_tails:
        a_halves = describe_rows(a, tile.block_m // 2, block_a)
    low, up, rank, stride_low, up_strides = NO_ARGUMENTS if adapter is None else adapter.arguments
    launch(
        _grouped_gemm_kernel, (programs,),
        out if scales.out is None else out.view(torch.uint8), before,
        a_tiles or a, a_halves or a, w_tiles or w, *scales.tensors,
        bias, row_weight, low, up, *order.arguments,
        N, D, out.stride(0), 0 if before is None else before.stride(0), a.stride(), w.stride(),
        *scales.strides,
        (0, 0) if bias is None else bias.stride(), rank, stride_low, up_strides,
        alpha, None if limit == math.inf else limit,
        ACTIVATION=activation, GATED=gated, INTERLEAVED=interleaved, GATHER=gather,
        ROW_WEIGHT="none" if row_weight is None else "input" if weight_on_input else "output",
        CODES=scales.codes(a, columns // 2, N if halves else 0),
        A_IS_DESC=a_tiles is not None, W_IS_DESC=w_tiles is not None, D_IS_LAST=w.stride(2) == 1,
        EVEN_D=D % tile.block_d == 0,
        PRECISION=fp32_precision(),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=tile.block_d, GROUP_M=tile.group_m,
        BLOCK_R=16 if adapter is None else adapter.block_r,
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
