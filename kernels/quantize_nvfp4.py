"""NVFP4: 4-bit codes, an 8-bit scale for 16 of them, and one fp32 number for a whole matrix.

    g     = max |x| / 2688            over the matrix; 2688 = 6 · 448, so that every s fits e4m3
    s     = e4m3(max |x| / (6 g))     over 16 elements of a row; 2^-9 ≤ s ≤ 448
    code  = e2m1(x / (s g))           to nearest even; beyond ±6 saturates
    value = code · (s g)

e2m1 is a sign and one of 0, .5, 1, 1.5, 2, 3, 4, 6. Example, g = 1: a block's maximum is 11, so s
is 1.875 (11 / 6 = 1.83, and e4m3 has 1.75 and 1.875). Its 11 becomes 11 / 1.875 = 5.87 → 6, the
value 11.25; its -3 becomes -1.6 → -1.5, the value -2.8125.

Memory, for one row of K elements:

    data    K / 2 bytes      element 2i in the low half of byte i, 2i + 1 in the high half
    scale   K / 16 bytes     e4m3; the last block of a row may be partial
    global_scale             a multiplier. Of one matrix (), of experts (E,). It may be given: then
                             also (E, 2), first and second half of each expert's rows (gate and up)

All intermediate results are fp32, in this order, as in NVIDIA ModelOpt; so with the same g the
codes are ModelOpt's. A block of zeros has scale byte 0 and codes 0; a matrix of zeros has g = 1. A
divisor of 0 counts as 1.

e2m1 has neither NaN nor infinity. A block with a NaN has the NaN scale byte 0x7F, so the NaN stays
visible in all its values; without a given g, which is then NaN too, in all of the matrix. Under a
given g an infinity saturates. NaN and infinities get the largest code, and under a NaN scale codes
are made as if s g were 1. -0 stays -0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow
from tmoe.kernels.launch import cdiv, launch, next_power_of_2, num_multiprocessors, pdl_options
from tmoe.kernels.quantize_input import (
    TILE,
    Source,
    amax_of_partials,
    load_32,
    partial_amax,
    tile_width,
)
from tmoe.kernels.quantize_ref import ALL_ROWS, Rows, dequantize_nvfp4_ref, quantize_nvfp4_ref  # noqa: F401
from tmoe.kernels.rounding import (
    E2M1_MAX,
    E4M3_MAX,
    amax,
    decode_e2m1,
    decode_e4m3,
    divide,
    encode_e2m1,
    encode_e4m3,
    pack,
    unpack,
)

BLOCK = tl.constexpr(16)  # elements that share a scale
LEAST_SCALE = tl.constexpr(2.0**-9)  # the smallest e4m3 number
RANGE = tl.constexpr(2688.0)


@triton.jit
def _global_scale_of(largest):
    g = tl.div_rn(largest, RANGE)
    return tl.where(g == 0.0, 1.0, g)


@triton.jit
def _load_global_scale(
    global_scale_ptr, expert_offsets_ptr, matrix, first_row, M, num_experts, stride_e, stride_half,
    PAIRS: tl.constexpr, ACROSS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """[PAIRS, 1, 1]: for each pair of blocks of a tile, the global scale of its row."""
    rows = first_row + tl.arange(0, PAIRS // ACROSS)
    expert = matrix
    if expert_offsets_ptr is not None:  # the rows of all experts are one matrix
        offs = 1 + tl.arange(0, BLOCK_E)
        starts = tl.load(expert_offsets_ptr + offs, mask=offs < num_experts, other=2**31 - 1)
        expert = tl.sum((starts[None, :] <= rows[:, None]).to(tl.int32), 1).to(tl.int64)
    half = (rows >= M // 2).to(tl.int64)
    g = tl.load(global_scale_ptr + expert * stride_e + half * stride_half)
    return tl.reshape(g[:, None].broadcast_to(PAIRS // ACROSS, ACROSS), (PAIRS, 1, 1))


@triton.jit(do_not_specialize=["M", "num_rows", "num_partials", "num_experts"])
def _quantize_nvfp4_kernel(
    data_ptr,  # (L, M, K / PER_WORD) words of e2m1 codes, written
    scale_ptr,  # (L, M, cdiv(K, 16)) e4m3 bytes, written
    global_scale_ptr,  # (L,), (E,) or (E, 2) fp32; read, or written if there are partials
    partial_ptr,  # (L, num_partials) fp32, whose maxima are those of the matrices; or None
    expert_offsets_ptr,  # (E+1,) or None
    x_ptr,  # (L, num_rows, K), or (L, num_rows, 2K) for a gated activation
    pick,  # of `load`
    num_partials, num_experts, stride_global_e, stride_global_half, words_in_row, blocks_in_row,
    M, K, num_rows, stride_l, stride_m, stride_k, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PER_WORD: tl.constexpr,  # codes in a word: 8 if K allows, or 2
    PAIRS: tl.constexpr, ACROSS: tl.constexpr, COL_TILES: tl.constexpr, SHARE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles · SHARE, L). A tile is PAIRS pairs of blocks, ACROSS of them in a row, and a
    thread has one: 64 bytes of bf16 in, 16 bytes of codes out. SHARE programs share a row's tiles.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    matrix = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(0) // SHARE * (PAIRS // ACROSS)
    i = tl.arange(0, PAIRS)
    row = first_row + i // ACROSS
    if partial_ptr is not None:
        g = _global_scale_of(amax_of_partials(partial_ptr, matrix, num_partials))
        if tl.program_id(0) == 0:
            tl.store(global_scale_ptr + matrix, g)
    else:
        g = _load_global_scale(
            global_scale_ptr, expert_offsets_ptr, matrix, first_row, M, num_experts,
            stride_global_e, stride_global_half, PAIRS, ACROSS, BLOCK_E,
        )  # fmt: skip
    x_ptr += matrix * stride_l
    data_ptr += (matrix * M + row)[:, None] * words_in_row
    scale_ptr += (matrix * M + row)[:, None] * blocks_in_row

    for tile in range(tl.program_id(0) % SHARE, COL_TILES, SHARE):
        pair = tile * ACROSS + i % ACROSS
        x = load_32(
            x_ptr, pick, row, pair, M, K, num_rows, stride_m, stride_k, alpha, limit,
            ACTIVATION, GATED,
        )  # fmt: skip
        x = tl.reshape(x, (PAIRS, 2, BLOCK))

        largest = amax(x, 2)  # [PAIRS, 2, 1]
        s = divide(largest, 6.0 * g, E4M3_MAX, KEEP_NAN=True)
        s_byte = encode_e4m3(tl.where(s < LEAST_SCALE, LEAST_SCALE, s))
        d = decode_e4m3(s_byte) * g
        d = tl.where(d > 0.0, d, 1.0)
        codes = encode_e2m1(divide(x, d, E2M1_MAX, KEEP_NAN=False), x)
        words = pack(tl.reshape(codes, (PAIRS, 2 * BLOCK)), PER_WORD).to(data_ptr.dtype.element_ty)
        s_byte = tl.where(largest == 0.0, 0, s_byte).to(tl.uint8)

        in_pair: tl.constexpr = 2 * BLOCK // PER_WORD
        cols = pair[:, None] * in_pair + tl.arange(0, in_pair)[None, :]
        tl.store(data_ptr + cols, words, mask=(row < M)[:, None] & (cols < words_in_row))
        cols = pair[:, None] * 2 + tl.arange(0, 2)[None, :]
        mask = (row < M)[:, None] & (cols < blocks_in_row)
        tl.store(scale_ptr + cols, tl.reshape(s_byte, (PAIRS, 2)), mask=mask)


@triton.jit(do_not_specialize=["M", "num_experts"])
def _dequantize_nvfp4_kernel(
    out_ptr,  # (L, M, K)  written
    data_ptr,  # (L, M, K / 2) bytes of two e2m1 codes
    scale_ptr,  # (L, M, cdiv(K, 16)) e4m3 bytes
    global_scale_ptr,  # (L,), (E,) or (E, 2), or None
    expert_offsets_ptr,  # (E+1,) or None
    num_experts, stride_global_e, stride_global_half,
    M, K, bytes_in_row, blocks_in_row, stride_data_l, stride_data_m, stride_data_k,
    stride_scale_l, stride_scale_m, stride_scale_k,
    BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr, ACROSS: tl.constexpr, COL_TILES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles, L), tiles as in the kernel above."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    matrix = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(0) // COL_TILES * (PAIRS // ACROSS)
    i = tl.arange(0, PAIRS)
    row = (first_row + i // ACROSS).to(tl.int64)[:, None]
    pair = (tl.program_id(0) % COL_TILES * ACROSS + i % ACROSS)[:, None]
    cols = pair * BLOCK + tl.arange(0, BLOCK)[None, :]  # bytes
    data_ptr += matrix * stride_data_l
    data_ptrs = data_ptr + row * stride_data_m + cols.to(tl.int64) * stride_data_k
    data = tl.load(data_ptrs, mask=(row < M) & (cols < bytes_in_row), other=0)
    values = tl.reshape(decode_e2m1(unpack(data)), (PAIRS, 2, BLOCK))

    cols = pair * 2 + tl.arange(0, 2)[None, :]
    scale_ptr += matrix * stride_scale_l
    scale_ptrs = scale_ptr + row * stride_scale_m + cols.to(tl.int64) * stride_scale_k
    s = tl.load(scale_ptrs, mask=(row < M) & (cols < blocks_in_row), other=0)
    s = decode_e4m3(s)[:, :, None]
    if global_scale_ptr is not None:
        s *= _load_global_scale(
            global_scale_ptr, expert_offsets_ptr, matrix, first_row, M, num_experts,
            stride_global_e, stride_global_half, PAIRS, ACROSS, BLOCK_E,
        )  # fmt: skip
    out = tl.reshape(values * s, (PAIRS, 2 * BLOCK))
    cols = pair * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)[None, :]
    out_ptrs = out_ptr + (matrix * M + row) * K + cols
    out = narrow(out, out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=(row < M) & (cols < K))


def _tiling(K: int) -> dict[str, int]:
    """How the kernels cut rows of K elements."""
    pairs, in_row = TILE // (2 * BLOCK.value), cdiv(K, 2 * BLOCK.value)
    across = tile_width(in_row, pairs)
    return {"PAIRS": pairs, "ACROSS": across, "COL_TILES": cdiv(in_row, across)}


def _global_scale_strides(
    g: Tensor, lead: tuple[int, ...], expert_offsets: Tensor | None
) -> tuple[int, int]:
    """From expert to expert, and from the first half of an expert's rows to the second."""
    if g.numel() == 1:
        return 0, 0
    if expert_offsets is None and tuple(g.shape) == (*lead, 2):
        return 2, 1
    return 1, 0


def quantize_nvfp4(
    x: Tensor,
    *,
    global_scale: Tensor | None = None,
    expert_offsets: Tensor | None = None,
    rows: Rows = ALL_ROWS,
    activation: tuple[str, float, float] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (..., M, K) fp32/fp16/bf16, K even -> data uint8 (..., M, K / 2), scale float8_e4m3fn
    (..., M, cdiv(K, 16)), global_scale fp32 x.shape[:-2].

    global_scale: given instead of computed: one number, x.shape[:-2], or x.shape[:-2] + (2,) for
        the halves of the rows; or (E,) with `expert_offsets`. Returned as it is, in fp32.
    expert_offsets: (E+1,); rows [offsets[e], offsets[e+1]) of the result have global scale e.
    rows: which rows of x (M, K) are quantised.
    activation: (name, alpha, limit); x is [gate | up], (..., M, 2K), if it is gated.
    """
    source = Source.of(x, rows, activation)
    *lead, M, K = source.shape
    data = x.new_empty((*lead, M, K // 2), dtype=torch.uint8)
    scale = x.new_empty((*lead, M, cdiv(K, BLOCK.value)), dtype=torch.uint8)
    is_given = global_scale is not None
    g = global_scale.float() if is_given else x.new_empty(lead, dtype=torch.float32)
    if source.is_empty:
        g = g if is_given else g.fill_(1.0)
    else:
        g = g.contiguous()
        strides = _global_scale_strides(g, source.lead, expert_offsets)
        tiling = _tiling(K)
        row_tiles = cdiv(M, tiling["PAIRS"] // tiling["ACROSS"])
        # Many tiles: a program takes all of its rows, and works out their global scale once.
        busy = row_tiles * source.L >= 16 * num_multiprocessors(x.device)
        share = 1 if busy else tiling["COL_TILES"]
        partial = None if is_given else partial_amax(source)
        num_partials = 0 if is_given else partial.shape[1]
        num_experts = 1 if expert_offsets is None else expert_offsets.numel() - 1
        per_word = 8 if K % 8 == 0 else 2
        launch(
            _quantize_nvfp4_kernel, (row_tiles * share, source.L),
            data.view(torch.int32) if per_word == 8 else data, scale, g, partial, expert_offsets,
            source.x, source.pick, num_partials, num_experts, *strides,
            K // per_word, scale.shape[-1], *source.arguments,
            BLOCK_E=next_power_of_2(num_experts), PER_WORD=per_word,
            SHARE=share, **tiling, **source.constants,
        )  # fmt: skip
    return data, scale.view(torch.float8_e4m3fn), g


def dequantize_nvfp4(
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    *,
    expert_offsets: Tensor | None = None,
    dtype: torch.dtype,
) -> Tensor:
    """code · (scale · global scale) in fp32, as `dtype`: (..., M, K). Data and scales may be
    strided; the global scale is as for `quantize_nvfp4`, None leaves it out."""
    *lead, M, half = data.shape
    K = 2 * half
    out = data.new_empty((*lead, M, K), dtype=dtype)
    if out.numel():
        g, strides = None, (0, 0)
        if global_scale is not None:
            g = global_scale.float().contiguous()
            strides = _global_scale_strides(g, tuple(lead), expert_offsets)
        num_experts = 1 if expert_offsets is None else expert_offsets.numel() - 1
        tiling = _tiling(K)
        programs = cdiv(M, tiling["PAIRS"] // tiling["ACROSS"]) * tiling["COL_TILES"]
        codes = data.reshape(-1, M, half)
        bytes_ = scale.view(torch.uint8).reshape(-1, *scale.shape[-2:])
        launch(
            _dequantize_nvfp4_kernel, (programs, codes.shape[0]),
            out, codes, bytes_, g, expert_offsets, num_experts, *strides,
            M, K, half, scale.shape[-1], *codes.stride(), *bytes_.stride(),
            BLOCK_E=next_power_of_2(num_experts), **tiling, **pdl_options(out.device),
        )  # fmt: skip
    return out
