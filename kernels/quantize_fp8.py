"""FP8: e4m3 codes with fp32 scales.

    scale = max |x| / 448          over a block of x, correctly rounded; 1 where that is 0
    code  = e4m3(x / scale)        to nearest even; beyond ±448 saturates
    value = code · scale

A block is a whole matrix ("tensor"), a row ("row": a token of the activations, a channel of the
weights), or bm × bk elements: in DeepSeek-V3 1 × 128 of the activations and 128 × 128 of the
weights. With `power_of_two` the scale is rounded up to a power of two first, so that the codes
belong to it.

A block with a NaN gets the scale NaN and NaN codes. One with an infinity gets the scale inf, NaN
for the infinity and 0 for the rest (with `power_of_two`: 2^127 and ±448, which is infinite again).
Under a given scale infinities saturate, and a scale of 0 counts as 1. -0 stays -0.
x is (..., M, K), any strides; the last blocks of a row or column may be partial.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options
from tmoe.kernels.quantize_input import (
    TILE,
    Source,
    amax_of_partials,
    load,
    partial_amax,
    tile_width,
)
from tmoe.kernels.quantize_ref import (  # noqa: F401
    ALL_ROWS,
    Rows,
    dequantize_fp8_ref,
    fp8_scale_shape,
    quantize_fp8_ref,
)
from tmoe.kernels.rounding import (
    E4M3_MAX,
    amax,
    bits_of,
    decode_e4m3,
    decode_ue8m0,
    e4m3_codes,
    e4m3_scale,
    encode_e4m3,
    encode_ue8m0,
    larger,
    reciprocal_ue8m0,
    scale_rounding,
)

LONGEST_ROW = 16384  # elements that a program keeps in registers
LONG_TILE, FEW = tl.constexpr(4096), tl.constexpr(32)  # columns; programs
CEIL = scale_rounding("e4m3", "ceil")
CEIL_ROUND_UP, EXPONENT = tl.constexpr(CEIL["ROUND_UP"]), tl.constexpr(CEIL["EXPONENT"])


@triton.jit
def _scale_of(largest, POWER_OF_TWO: tl.constexpr):
    if POWER_OF_TWO:
        scale = decode_ue8m0(encode_ue8m0(largest, CEIL_ROUND_UP, EXPONENT))
        return tl.where(tl.div_rn(largest, E4M3_MAX) == 0.0, 1.0, scale)
    else:
        return e4m3_scale(largest)


@triton.jit
def _blocks(x, BM: tl.constexpr, BK: tl.constexpr):
    """A tile [ROWS, COLS] as blocks [ROWS / BM, BM, COLS / BK, BK]."""
    return tl.reshape(x, (x.shape[0] // BM, BM, x.shape[1] // BK, BK))


@triton.jit
def _block_amax(blocks):
    """max |x| of every block: [ROWS / BM, 1, COLS / BK, 1]."""
    return amax(amax(blocks, 3), 1)


@triton.jit
def _codes(blocks, scale, POWER_OF_TWO: tl.constexpr):
    """e4m3 bytes of blocks under their scales."""
    if POWER_OF_TWO:
        return encode_e4m3(blocks * reciprocal_ue8m0(bits_of(scale) >> 23))
    else:
        return e4m3_codes(blocks, scale)


@triton.jit(do_not_specialize=["M", "num_rows", "num_partials", "num_copies"])
def _quantize_fp8_kernel(
    data_ptr,  # (L, M, K) e4m3 bytes, written
    scale_ptr,  # (L, blocks of a column, blocks of a row) fp32; written, or read if HAS_SCALE
    copy_ptr,  # (M, num_copies)  which rows of data and scale a row of x becomes, or -1; or None
    partial_ptr,  # (L, num_partials) fp32, whose maxima are those of the matrices; or None
    x_ptr,  # (L, num_rows, K), or (L, num_rows, 2K) for a gated activation
    pick,  # of `load`
    num_copies, num_partials, stride_scale_l, stride_scale_m, stride_scale_k,
    M, K, num_rows, stride_l, stride_m, stride_k, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    HAS_SCALE: tl.constexpr, POWER_OF_TWO: tl.constexpr, COPIES: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, COL_TILES: tl.constexpr, IN_PASSES: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of ROWS × COLS elements, L); a tile is whole BM × BK blocks. IN_PASSES: rows too
    long for the registers; one program reads them twice, COLS at a time."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        # Where many programs take their time, those of a GEMM that come early crowd on the first
        # multiprocessors that have room, and the others have little to do later.
        if COLS <= LONG_TILE or tl.num_programs(0) <= FEW:
            tl.extra.cuda.gdc_launch_dependents()
    matrix = tl.program_id(1).to(tl.int64)
    tiles_across: tl.constexpr = 1 if IN_PASSES else COL_TILES
    tile_m = tl.program_id(0) // tiles_across
    tile_k = tl.program_id(0) % tiles_across
    rows = tile_m * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tile_k * COLS + tl.arange(0, COLS)[None, :]
    x_ptr += matrix * stride_l
    data_ptrs = data_ptr + (matrix * M + rows) * K + cols
    block_m = tile_m * (ROWS // BM) + tl.arange(0, ROWS // BM)[:, None]
    block_k = tile_k * (COLS // BK) + tl.arange(0, COLS // BK)[None, :]
    scale_ptr += matrix * stride_scale_l
    scale_ptrs = scale_ptr + block_m.to(tl.int64) * stride_scale_m + block_k * stride_scale_k
    scale_mask = (block_m * BM < M) & (block_k * BK < K)

    x = load(
        x_ptr, pick, rows, cols, M, K, num_rows, stride_m, stride_k, alpha, limit,
        ACTIVATION, GATED,
    )  # fmt: skip
    blocks = _blocks(x, BM, BK)
    if HAS_SCALE:
        scale = tl.load(scale_ptrs, mask=scale_mask, other=1.0)[:, None, :, None]
    else:
        if partial_ptr is not None:
            largest = amax_of_partials(partial_ptr, matrix, num_partials)
            largest = tl.full((1, 1, 1, 1), largest, tl.float32)
            scale_mask = scale_mask & (tl.program_id(0) == 0)
        else:
            largest = _block_amax(blocks)
        if IN_PASSES:
            for k in range(COLS, K, COLS):
                more = load(
                    x_ptr, pick, rows, cols + k, M, K, num_rows, stride_m, stride_k,
                    alpha, limit, ACTIVATION, GATED,
                )  # fmt: skip
                largest = larger(largest, _block_amax(_blocks(more, BM, BK)))
        scale = _scale_of(largest, POWER_OF_TWO)
        if copy_ptr is None:
            tl.store(scale_ptrs, tl.reshape(scale, scale_ptrs.shape), mask=scale_mask)

    codes = tl.reshape(_codes(blocks, scale, POWER_OF_TWO), (ROWS, COLS))
    if copy_ptr is not None:  # here BM is 1
        nth = tl.arange(0, COPIES)[None, :]
        mask = (rows < M) & (nth < num_copies)
        copy = tl.load(copy_ptr + rows * num_copies + nth, mask=mask, other=-1)[:, :, None]
        copy_ptrs = data_ptr + copy.to(tl.int64) * K + cols[:, None, :]
        tl.store(copy_ptrs, codes[:, None, :], mask=(copy >= 0) & (cols < K)[:, None, :])
        copy_ptrs = (block_k * stride_scale_k)[:, None, :] + scale_ptr
        copy_ptrs += copy.to(tl.int64) * stride_scale_m
        values = tl.reshape(scale, (ROWS, 1, COLS // BK))
        tl.store(copy_ptrs, values, mask=(copy >= 0) & (block_k * BK < K)[:, None, :])
    else:
        tl.store(data_ptrs, codes, mask=(rows < M) & (cols < K))
    if IN_PASSES:
        for k in range(COLS, K, COLS):
            more = load(
                x_ptr, pick, rows, cols + k, M, K, num_rows, stride_m, stride_k,
                alpha, limit, ACTIVATION, GATED,
            )  # fmt: skip
            codes = tl.reshape(_codes(_blocks(more, BM, BK), scale, POWER_OF_TWO), (ROWS, COLS))
            tl.store(data_ptrs + k, codes, mask=(rows < M) & (cols + k < K))


@triton.jit(do_not_specialize=["M"])
def _dequantize_fp8_kernel(
    out_ptr,  # (L, M, K)  written
    data_ptr,  # (L, M, K) e4m3 bytes
    scale_ptr,  # (L, blocks of a column, blocks of a row), any float dtype
    M, K, stride_data_l, stride_data_m, stride_data_k,
    stride_scale_l, stride_scale_m, stride_scale_k,
    BM: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, COL_TILES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of ROWS × COLS elements, L)."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    matrix = tl.program_id(1).to(tl.int64)
    tile_m, tile_k = tl.program_id(0) // COL_TILES, tl.program_id(0) % COL_TILES
    rows = (tile_m * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    cols = tile_k * COLS + tl.arange(0, COLS)[None, :]
    mask = (rows < M) & (cols < K)
    data_ptr += matrix * stride_data_l
    data_ptrs = data_ptr + rows * stride_data_m + cols.to(tl.int64) * stride_data_k
    values = decode_e4m3(tl.load(data_ptrs, mask=mask, other=0))

    block_m = (tile_m * (ROWS // BM) + tl.arange(0, ROWS // BM)[:, None]).to(tl.int64)
    block_k = tile_k * (COLS // BK) + tl.arange(0, COLS // BK)[None, :]
    scale_ptrs = scale_ptr + block_m * stride_scale_m + block_k.to(tl.int64) * stride_scale_k
    scale_mask = (block_m * BM < M) & (block_k * BK < K)
    scale = tl.load(scale_ptrs + matrix * stride_scale_l, mask=scale_mask, other=0.0)
    scale = widen(scale).to(tl.float32)

    blocks = _blocks(values, BM, BK) * scale[:, None, :, None]
    out = narrow(tl.reshape(blocks, (ROWS, COLS)), out_ptr.dtype.element_ty)
    tl.store(out_ptr + (matrix * M + rows) * K + cols, out, mask=mask)


def _tiling(block: str | Sequence[int], K: int, *, whole_rows: bool) -> dict[str, int]:
    """Tile sizes, and the blocks as a tile sees them: of "tensor" and "row" as wide as the tile."""
    cols = tile_width(K, 1024)
    if block == "row" and whole_rows:
        cols = min(next_power_of_2(K), LONGEST_ROW)
    if block in ("tensor", "row"):
        rows = max(1, TILE // cols)
        bm, bk = (rows if block == "tensor" else 1), cols
    else:
        bm, bk = block
        cols = max(bk, cols) if bm == 1 else bk
        rows = max(bm, TILE // cols) if bm == 1 else bm
    return {
        "BM": bm, "BK": bk, "ROWS": rows, "COLS": cols, "COL_TILES": cdiv(K, cols),
        "num_warps": min(16, max(4, rows * cols // 1024)),
    }  # fmt: skip


def _scale_strides(scale: Tensor, lead: int) -> tuple[Tensor, int, int, int]:
    """`scale` (L, ...) and its strides from matrix to matrix, from block row to block row and from
    block to block; 0 where all share one. `lead` is the number of dimensions before the matrix."""
    if scale.numel() == 1:
        return scale, 0, 0, 0
    scale = scale.reshape(-1, *scale.shape[lead:])
    return scale, *scale.stride(), *(0,) * (3 - scale.dim())


def quantize_fp8(
    x: Tensor,
    *,
    block: str | Sequence[int],
    scale: Tensor | None = None,
    power_of_two: bool = False,
    rows: Rows = ALL_ROWS,
    activation: tuple[str, float, float] | None = None,
    scales_by_column: bool = False,
    copies: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x (..., M, K) fp32/fp16/bf16 -> data (..., M, K) float8_e4m3fn, scale fp32.

    block: "tensor", "row" or (bm, bk), powers of two; scale is x.shape[:-2], x.shape[:-1] or
        (..., cdiv(M, bm), cdiv(K, bk)).
    scale: given instead of computed, of that shape or one number.
    power_of_two: computed scales are rounded up to powers of two.
    rows: which rows of x (M, K) are quantised.
    activation: (name, alpha, limit); x is [gate | up], (..., M, 2K), if it is gated.
    scales_by_column: in memory, the computed scales of a column of blocks of x (M, K) lie together.
    copies: (M, n) int32, contiguous: row m of x (M, K) becomes the rows copies[m] of the result,
        which has n · M; none where that is -1. Other rows aren't written. For blocks (1, bk).
    """
    source = Source.of(x, rows, activation)
    result = source.shape if copies is None else (copies.numel(), source.K)
    shape = fp8_scale_shape(result, block)
    has_scale = scale is not None
    if has_scale:
        scale = scale.float()
    elif scales_by_column:
        scale = x.new_empty(shape[::-1], dtype=torch.float32).T
    else:
        scale = x.new_empty(shape, dtype=torch.float32)
    data = x.new_empty(result, dtype=torch.uint8)
    if source.is_empty:
        scale = scale if has_scale else scale.fill_(1.0)
    else:
        partial = partial_amax(source) if block == "tensor" and not has_scale else None
        tiling = _tiling(block, source.K, whole_rows=not has_scale)
        in_passes = block == "row" and not has_scale and tiling["COL_TILES"] > 1
        programs = cdiv(source.M, tiling["ROWS"]) * (1 if in_passes else tiling["COL_TILES"])
        scales, *strides = _scale_strides(scale, len(source.lead))
        launch(
            _quantize_fp8_kernel, (programs, source.L),
            data, scales, copies, partial, source.x, source.pick,
            0 if copies is None else copies.shape[1],
            0 if partial is None else partial.shape[1], *strides, *source.arguments,
            HAS_SCALE=has_scale, POWER_OF_TWO=power_of_two and not has_scale,
            COPIES=1 if copies is None else next_power_of_2(copies.shape[1]),
            IN_PASSES=in_passes, **tiling, **source.constants,
        )  # fmt: skip
    return data.view(torch.float8_e4m3fn), scale.expand(shape)


def dequantize_fp8(
    data: Tensor, scale: Tensor, *, block: str | Sequence[int], dtype: torch.dtype
) -> Tensor:
    """code · scale in fp32, as `dtype`: (..., M, K). Data and scales may be strided; the scale has
    the shape that `quantize_fp8` gives, or is one number."""
    M, K = data.shape[-2:]
    out = data.new_empty(data.shape, dtype=dtype)
    if out.numel() == 0:
        return out
    codes = data.view(torch.uint8).reshape(-1, M, K)
    scale, *strides = _scale_strides(scale, data.dim() - 2)
    tiling = _tiling(block, K, whole_rows=False)
    programs = cdiv(M, tiling["ROWS"]) * tiling["COL_TILES"]
    launch(
        _dequantize_fp8_kernel, (programs, codes.shape[0]),
        out, codes, scale, M, K, *codes.stride(), *strides,
        **tiling, **pdl_options(out.device),
    )  # fmt: skip
    return out
