"""Quantised grouped GEMM: the grouped GEMM whose weights, and perhaps rows, are codes with scales.

    y[r, n] = act(sum_d a[r, d] · w[e, n, d] + bias[e, n])          r in the rows of expert e
    w[e, n, d] = code · scale of its block · global scale of e      e4m3 or e2m1 codes
    a[r, d]    = bf16 or fp32; or e4m3 code · scale of its block

Rows, tiles, gather and everything after the sum are those of `grouped_gemm.py`. Where a scale is
applied depends on how far it reaches:

    along all of d     after the sum, once per row or column        tensors, rows, columns, global
    128 of d           each step of 128 is summed by itself, and    fp8 blocks
                       joins the total multiplied by both scales
    32 or 16 of d      to the codes, before they are multiplied:    MXFP8, MXFP4, NVFP4
                       bf16 holds a code times such a scale exactly

e4m3 codes of both are multiplied as they are. Otherwise the weights' codes become numbers of a's
type, in registers: the weights stand on the left, w · aᵀ, since that is the operand which tensor
cores take from registers, and since few rows then make a narrow tile instead of a padded one.
S rows, E experts, N output columns, D depth.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.grouped_gemm import finish_tile, load_tile, tile_position
from tmoe.kernels.launch import cdiv, pdl_options
from tmoe.kernels.rounding import decode_e2m1, decode_e4m3, decode_ue8m0, unpack
from tmoe.kernels.sort import SortedTokens
from tmoe.kernels.tiles import Tile


@triton.jit
def _decode_scale(scale, TYPE: tl.constexpr):
    """Scales as they are stored, fp32 or bytes, in fp32."""
    if TYPE == "e4m3":
        return decode_e4m3(scale)
    elif TYPE == "e8m0":
        return decode_ue8m0(scale.to(tl.int32))
    else:
        return scale


@triton.jit
def _load_codes(ptr, rows, first, D, stride_row, PACKED: tl.constexpr, BLOCK_D: tl.constexpr):
    """Codes of `rows` [n, 1] from depth `first` on, 0 beyond D: [n, BLOCK_D] bytes, or half as many
    with two codes each."""
    per_byte: tl.constexpr = 2 if PACKED else 1
    column = first // per_byte + tl.arange(0, BLOCK_D // per_byte)[None, :]
    ptrs = ptr + rows.to(tl.int64) * stride_row + column
    return tl.load(ptrs, mask=column < tl.cdiv(D, per_byte), other=0)


@triton.jit
def _values(codes, scale, PACKED: tl.constexpr, SCALE_D: tl.constexpr, dtype: tl.constexpr):
    """Codes as numbers of `dtype`, times their scales [n, BLOCK_D / SCALE_D] if SCALE_D > 0."""
    x = decode_e2m1(unpack(codes)) if PACKED else decode_e4m3(codes)
    if SCALE_D > 0:
        n: tl.constexpr = x.shape[0]
        m: tl.constexpr = x.shape[1]
        x = tl.reshape(x, (n, m // SCALE_D, SCALE_D)) * scale[:, :, None]
        x = tl.reshape(x, (n, m))
    return narrow(x, dtype)


@triton.jit(do_not_specialize=["max_tiles", "top_k", "alpha", "limit"])
def _quantized_gemm_kernel(
    out_ptr,  # (S, N)  written
    a_ptr,  # (T, D) if GATHER, else (S, D): numbers, or e4m3 codes
    a_scale_ptr,  # fp32 (1,), (rows,) or (rows, cdiv(D, 128)); or None
    w_ptr,  # (E, N, D) bytes of e4m3, or (E, N, D / 2) of two e2m1; GATED: 2N
    w_scale_ptr,  # (E, …), one for SCALE_N rows and SCALE_D columns of w
    w_global_ptr,  # (E, halves) fp32 or None
    bias_ptr, row_weight_ptr, row_to_slot_ptr, tiles_ptr, num_tiles_ptr,  # as in grouped_gemm.py
    max_tiles, N, D, top_k, stride_out, a_strides, a_scale_strides, w_strides, w_scale_strides,
    w_global_strides, bias_strides, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    GATHER: tl.constexpr, ROW_WEIGHT: tl.constexpr,
    A_IS_CODES: tl.constexpr, PACKED: tl.constexpr, SCALE_TYPE: tl.constexpr,
    SCALE_N: tl.constexpr,  # rows of w that share a scale; 0: all
    SCALE_D: tl.constexpr,  # columns that share one; 0: all
    A_SCALE_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles,)."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    COLUMNS: tl.constexpr = BLOCK_N * (2 if GATED else 1)
    FINE: tl.constexpr = 0 < SCALE_D and SCALE_D < 128
    BLOCKWISE: tl.constexpr = SCALE_D == 128 or A_SCALE_D == 128
    tile_m, tile_n = tile_position(tl.program_id(0), max_tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
    if tile_m < tl.load(num_tiles_ptr):
        expert, first_row, end_row = load_tile(tiles_ptr, tile_m)
        rows = first_row + tl.arange(0, BLOCK_M)
        in_expert = rows < end_row
        slots = rows
        if GATHER or ROW_WEIGHT != "none":
            slots = tl.load(row_to_slot_ptr + rows, mask=in_expert, other=0)
        # Rows past the expert's end and columns past N are computed from valid ones, never stored.
        a_rows = slots // top_k if GATHER else tl.where(in_expert, rows, first_row)
        column = tl.arange(0, COLUMNS)
        if GATED and not INTERLEAVED:
            n = tile_n * BLOCK_N + column % BLOCK_N
            w_rows = tl.where(n < N, n, 0) + (column // BLOCK_N) * N
        else:
            n = tile_n * COLUMNS + column
            w_rows = tl.where(n < N * (COLUMNS // BLOCK_N), n, 0)
        w_ptr += expert.to(tl.int64) * w_strides[0]
        w_scale_ptr += expert.to(tl.int64) * w_scale_strides[0]
        scale_rows = w_rows // SCALE_N if SCALE_N > 0 else w_rows * 0
        w_scale_ptrs = w_scale_ptr + scale_rows.to(tl.int64) * w_scale_strides[1]
        if a_scale_ptr is not None:
            a_scale_ptrs = a_scale_ptr + a_rows.to(tl.int64) * a_scale_strides[0]

        acc = tl.zeros((COLUMNS, BLOCK_M), tl.float32)
        for d in tl.range(0, D, BLOCK_D, num_stages=NUM_STAGES):
            w = _load_codes(w_ptr, w_rows[:, None], d, D, w_strides[1], PACKED, BLOCK_D)
            depth = d + tl.arange(0, BLOCK_D)[:, None]
            a_ptrs = a_ptr + a_rows.to(tl.int64)[None, :] * a_strides[0] + depth * a_strides[1]
            a = tl.load(a_ptrs, mask=depth < D, other=0.0)  # [BLOCK_D, BLOCK_M]
            if A_IS_CODES:
                step = tl.dot(w.to(tl.float8e4nv, bitcast=True), a)
            else:
                a = widen(a)
                scale = 0.0
                if FINE:
                    block = d // SCALE_D + tl.arange(0, BLOCK_D // SCALE_D)[None, :]
                    ptrs = w_scale_ptrs[:, None] + block * w_scale_strides[2]
                    stored = tl.load(ptrs, mask=block * SCALE_D < D, other=0)
                    scale = _decode_scale(stored, SCALE_TYPE)
                values = _values(w, scale, PACKED, SCALE_D if FINE else 0, a_ptr.dtype.element_ty)
                step = tl.dot(widen(values), a, input_precision="ieee")
            if BLOCKWISE:
                block = d // 128
                factor = tl.load(w_scale_ptrs + block * w_scale_strides[2])[:, None]
                if a_scale_ptr is not None:
                    factor *= tl.load(a_scale_ptrs + block * a_scale_strides[1])[None, :]
                acc = tl.fma(step, factor, acc)
            else:
                acc += step

        if SCALE_D == 0:
            acc *= _decode_scale(tl.load(w_scale_ptrs), SCALE_TYPE)[:, None]
        if a_scale_ptr is not None and not BLOCKWISE:
            acc *= tl.load(a_scale_ptrs)[None, :]
        if w_global_ptr is not None:
            half = w_rows // tl.cdiv(N * (COLUMNS // BLOCK_N), 2)
            ptrs = w_global_ptr + expert * w_global_strides[0] + half * w_global_strides[1]
            acc *= tl.load(ptrs)[:, None]
        problem = (
            (out_ptr, w_ptr, bias_ptr, row_weight_ptr, row_to_slot_ptr, N, D, top_k, alpha, limit),
            (stride_out, a_strides, w_strides, bias_strides),
        )
        finish_tile(
            problem, acc.T, expert, rows, in_expert, slots, tile_n,
            ACTIVATION, GATED, INTERLEAVED, ROW_WEIGHT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def quantized_gemm(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    order: SortedTokens,
    tile: Tile,
    *,
    a_scale: Tensor | None = None,
    w_global_scale: Tensor | None = None,
    packed: bool = False,
    scale_rows: int = 0,
    scale_columns: int = 0,
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

    a: (S, D) or with `gather` (T, D); bf16, fp32 or float8_e4m3fn, times `a_scale` fp32 (), (rows,)
    or, of codes, (rows, cdiv(D, 128)), if there is one. w: codes (E, N, D) float8_e4m3fn, or
    `packed` (E, N, D / 2) uint8; if `gated` 2N rows. w_scale: (E, …) fp32, float8_e4m3fn or uint8
    (e8m0), one for `scale_rows` × `scale_columns` codes, 0 meaning all. w_global_scale: fp32, one
    number, (E,) or (E, 2). The rest is as for `grouped_gemm`.
    """
    N, D = out.shape[1], a.shape[1]
    max_tiles = order.tiles.shape[0]
    programs = max_tiles * cdiv(N, tile.block_n)
    if programs == 0:
        return out
    a_strides, a_scale_d = (0, 0), 0
    if a_scale is not None:
        a_strides = (*a_scale.stride(), 0, 0)[:2] if a_scale.dim() else (0, 0)
        a_scale_d = 128 if a_scale.dim() == 2 else 0
    scale_strides = (*w_scale.stride(), 0, 0)[:3]
    if scale_rows == 0 and scale_columns != 0:
        scale_strides = (w_scale.stride(0), 0, w_scale.stride(1))
    g = w_global_scale
    g_strides = (0, 0) if g is None or g.numel() == 1 else (*g.stride(), 0)[:2]
    scale_type = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e8m0"}.get(w_scale.dtype, "fp32")
    w_scale = w_scale if scale_type == "fp32" else w_scale.view(torch.uint8)
    _quantized_gemm_kernel[(programs,)](
        out, a, a_scale, w.view(torch.uint8), w_scale, g,
        bias, row_weight, order.row_to_slot, order.tiles, order.num_tiles,
        max_tiles, N, D, order.top_k, out.stride(0), a.stride(), a_strides,
        w.stride()[:2], scale_strides, g_strides,
        (0, 0) if bias is None else bias.stride(), alpha, limit,
        ACTIVATION=activation, GATED=gated, INTERLEAVED=interleaved, GATHER=gather,
        ROW_WEIGHT="none" if row_weight is None else "input" if weight_on_input else "output",
        A_IS_CODES=a.dtype == torch.float8_e4m3fn, PACKED=packed, SCALE_TYPE=scale_type,
        SCALE_N=scale_rows, SCALE_D=scale_columns, A_SCALE_D=a_scale_d,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=tile.block_d, GROUP_M=tile.group_m,
        NUM_STAGES=tile.num_stages, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **pdl_options(out.device),
    )  # fmt: skip
    return out
