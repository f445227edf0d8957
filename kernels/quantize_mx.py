"""MXFP8 and MXFP4: blocks of 32 elements of a row share a power of two.

    scale = 2^e                one ue8m0 byte, e + 127, chosen from max |x| of the block
    code  = round(x / scale)   e4m3 or e2m1 (4 bits), to nearest even; beyond ±MAX saturates
    value = code · scale

How e is chosen (`scale_rule`); MAX is 448 = 1.75 · 2^8 for e4m3 and 6 = 1.5 · 2^2 for e2m1:

    floor   exponent of max |x|, less that of MAX           the OCP text; up to 1/8 or 1/4 saturates
    even    the same of max |x| rounded to one binary place behind the point
    ceil    the least e with max |x| ≤ MAX · 2^e            nothing saturates

Quantising the values again changes none of them, except under "even" for e4m3: a maximum that was
rounded up to 448 gets twice the scale the second time.

e stays within -127 … 127, so a block of zeros has byte 0. A block with a NaN has byte 0xFF, which
is NaN; otherwise one with an infinity has 254 and the infinity saturates. e4m3 codes under a NaN
scale are NaN. e2m1 has none: there NaN and infinities get the largest code, and under a NaN scale
codes are made as if it were 1. -0 stays -0.

e2m1 codes are packed two to a byte: element 2i in the low half, 2i + 1 in the high half.
x is (..., M, K), any strides, K even for e2m1; a row's last block may be partial.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow
from tmoe.kernels.launch import cdiv, launch, pdl_options
from tmoe.kernels.quantize_input import TILE, Source, load_32, tile_width
from tmoe.kernels.quantize_ref import ALL_ROWS, Rows, dequantize_mx_ref, quantize_mx_ref  # noqa: F401
from tmoe.kernels.rounding import (
    E2M1_MAX,
    amax,
    at_most,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    pack,
    reciprocal_ue8m0,
    scale_rounding,
    unpack,
)

MANY_ELEMENTS = 2**22
BLOCK = tl.constexpr(32)  # elements that share a scale


@triton.jit(do_not_specialize=["M", "num_rows"])
def _quantize_mx_kernel(
    data_ptr,  # (L, M, K) e4m3 bytes, or (L, M, K / PER_WORD) words of e2m1 codes; written
    scale_ptr,  # (L, M, cdiv(K, 32)) ue8m0 bytes, written
    x_ptr,  # (L, num_rows, K), or (L, num_rows, 2K) for a gated activation
    pick,  # of `load`
    words_in_row, blocks_in_row,
    M, K, num_rows, stride_l, stride_m, stride_k, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    ROUND_UP: tl.constexpr, EXPONENT: tl.constexpr,
    PER_WORD: tl.constexpr,  # 1 for e4m3; codes in a word for e2m1: 8 if K allows, or 2
    BLOCKS: tl.constexpr, ACROSS: tl.constexpr, COL_TILES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles, L). A tile is BLOCKS blocks of 32: ACROSS in a row, and so many rows."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    matrix = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCKS)
    row = tl.program_id(0) // COL_TILES * (BLOCKS // ACROSS) + i // ACROSS
    block = tl.program_id(0) % COL_TILES * ACROSS + i % ACROSS
    x = load_32(
        x_ptr + matrix * stride_l, pick, row, block,
        M, K, num_rows, stride_m, stride_k, alpha, limit, ACTIVATION, GATED,
    )  # fmt: skip

    byte = encode_ue8m0(amax(x, 1), ROUND_UP, EXPONENT)  # [BLOCKS, 1]
    unit = reciprocal_ue8m0(byte)
    if PER_WORD == 1:
        words = encode_e4m3(x * unit)
    else:
        quotient = at_most(tl.abs(x) * tl.where(byte == 255, 1.0, unit), E2M1_MAX, False)
        words = pack(encode_e2m1(quotient, x), PER_WORD)

    in_block: tl.constexpr = BLOCK // PER_WORD
    cols = block[:, None] * in_block + tl.arange(0, in_block)[None, :]
    data_ptrs = data_ptr + (matrix * M + row)[:, None] * words_in_row + cols
    mask = (row < M)[:, None] & (cols < words_in_row)
    tl.store(data_ptrs, words.to(data_ptr.dtype.element_ty), mask=mask)
    scale_ptrs = scale_ptr + (matrix * M + row) * blocks_in_row + block
    mask = (row < M) & (block < blocks_in_row)
    tl.store(scale_ptrs, tl.reshape(byte, (BLOCKS,)).to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _dequantize_mx_kernel(
    out_ptr,  # (L, M, K)  written
    data_ptr,  # (L, M, K) e4m3 bytes, or (L, M, K / 2) bytes of two e2m1 codes
    scale_ptr,  # (L, M, cdiv(K, 32)) ue8m0 bytes
    M, K, bytes_in_row, blocks_in_row, stride_data_l, stride_data_m, stride_data_k,
    stride_scale_l, stride_scale_m, stride_scale_k,
    PER_BYTE: tl.constexpr,
    BLOCKS: tl.constexpr, ACROSS: tl.constexpr, COL_TILES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles, L), tiles as in the kernel above."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    matrix = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCKS)
    row = (tl.program_id(0) // COL_TILES * (BLOCKS // ACROSS) + i // ACROSS).to(tl.int64)
    block = tl.program_id(0) % COL_TILES * ACROSS + i % ACROSS
    in_block: tl.constexpr = BLOCK // PER_BYTE
    cols = block[:, None] * in_block + tl.arange(0, in_block)[None, :]
    mask = (row < M)[:, None] & (cols < bytes_in_row)
    data_ptr += matrix * stride_data_l
    data_ptrs = data_ptr + row[:, None] * stride_data_m + cols.to(tl.int64) * stride_data_k
    data = tl.load(data_ptrs, mask=mask, other=0)
    values = decode_e4m3(data) if PER_BYTE == 1 else decode_e2m1(unpack(data))

    scale_ptr += matrix * stride_scale_l
    scale_ptrs = scale_ptr + row * stride_scale_m + block.to(tl.int64) * stride_scale_k
    byte = tl.load(scale_ptrs, mask=(row < M) & (block < blocks_in_row), other=0).to(tl.int32)
    out = values * decode_ue8m0(byte)[:, None]
    cols = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    out_ptrs = out_ptr + (matrix * M + row)[:, None] * K + cols
    mask = (row < M)[:, None] & (cols < K)
    tl.store(out_ptrs, narrow(out, out_ptr.dtype.element_ty), mask=mask)


def _tiling(M: int, K: int) -> tuple[int, dict[str, int]]:
    """Programs per matrix, and the kernels' constants. Where there is much to do, a thread gets two
    blocks: more loads are on their way at once."""
    tile = TILE if M * K < MANY_ELEMENTS else 2 * TILE
    blocks, in_row = tile // BLOCK.value, cdiv(K, BLOCK.value)
    across = tile_width(in_row, blocks)
    col_tiles = cdiv(in_row, across)
    constants = {"BLOCKS": blocks, "ACROSS": across, "COL_TILES": col_tiles}
    return cdiv(M, blocks // across) * col_tiles, constants


def quantize_mx(
    x: Tensor,
    *,
    element: str,
    scale_rule: str,
    rows: Rows = ALL_ROWS,
    activation: tuple[str, float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """x (..., M, K) fp32/fp16/bf16 -> data, scale uint8 (..., M, cdiv(K, 32)).

    element: "e4m3": data (..., M, K) float8_e4m3fn; "e2m1": data (..., M, K / 2) uint8.
    scale_rule: "floor", "even" or "ceil".
    rows: which rows of x (M, K) are quantised.
    activation: (name, alpha, limit); x is [gate | up], (..., M, 2K), if it is gated.
    """
    source = Source.of(x, rows, activation)
    *lead, M, K = source.shape
    packed = element == "e2m1"
    data = x.new_empty((*lead, M, K // 2 if packed else K), dtype=torch.uint8)
    scale = x.new_empty((*lead, M, cdiv(K, BLOCK.value)), dtype=torch.uint8)
    if not source.is_empty:
        per_word = (8 if K % 8 == 0 else 2) if packed else 1
        programs, tiling = _tiling(M, K)
        launch(
            _quantize_mx_kernel, (programs, source.L),
            data.view(torch.int32) if per_word == 8 else data, scale, source.x, source.pick,
            K // per_word, scale.shape[-1], *source.arguments,
            PER_WORD=per_word, **scale_rounding(element, scale_rule),
            **tiling, **source.constants,
        )  # fmt: skip
    return data if packed else data.view(torch.float8_e4m3fn), scale


def dequantize_mx(data: Tensor, scale: Tensor, *, element: str, dtype: torch.dtype) -> Tensor:
    """code · scale in fp32, as `dtype`: (..., M, K). Data and scales may be strided."""
    per_byte = 2 if element == "e2m1" else 1
    *lead, M, columns = data.shape
    K = columns * per_byte
    out = data.new_empty((*lead, M, K), dtype=dtype)
    if out.numel():
        codes = data.view(torch.uint8).reshape(-1, M, columns)
        bytes_ = scale.view(torch.uint8).reshape(-1, *scale.shape[-2:])
        programs, tiling = _tiling(M, K)
        launch(
            _dequantize_mx_kernel, (programs, codes.shape[0]),
            out, codes, bytes_, M, K, columns, scale.shape[-1], *codes.stride(), *bytes_.stride(),
            PER_BYTE=per_byte, **tiling, **pdl_options(out.device),
        )  # fmt: skip
    return out
