"""Quantised weights on their way to the tensor cores: codes become numbers, scales join the sums.

Where a scale is applied depends on how far along the depth it reaches:

    along all of it    after the sum, once per row or column        tensors, rows, columns, global
    128                each step of 128 is summed by itself, and    fp8 blocks
                       joins the total multiplied by both scales
    32 or 16           to the codes, before they are multiplied:    MXFP8, MXFP4, NVFP4
                       bf16 holds a code times such a scale exactly
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from tmoe.kernels.casts import INTERPRETED, narrow
from tmoe.kernels.gemm_tile import weight_rows
from tmoe.kernels.rounding import decode_e2m1, decode_e4m3, decode_ue8m0, unpack


@dataclass(frozen=True, slots=True)
class Codes:
    """What a kernel is compiled for: where the codes are, and how far a scale reaches."""

    packed: bool = False  # two codes in a byte of w
    a_packed: bool = False  # and in a byte of a
    block_scaled: bool = False  # both are multiplied as codes, together with their fine scales
    scale_type: str = "fp32"  # of w's scales as they are stored: "fp32", "e4m3", "e8m0"
    rows: int = 0  # of w that share a scale; 0: all
    columns: int = 0
    a_columns: int = 0  # of a that share one; 0: the whole row, or all
    half_shares: bool = False  # one scale serves half of a tile's columns for 128 of the depth
    global_halves: bool = False  # the second half of an expert's rows has a global scale of its own

    @property
    def element(self) -> str:
        return "e2m1" if self.packed else "e4m3"

    @property
    def a_element(self) -> str:
        return "e2m1" if self.a_packed else "e4m3"

    @property
    def is_fine(self) -> bool:
        return 0 < self.columns < 128

    @property
    def is_blockwise(self) -> bool:
        return 128 in (self.columns, self.a_columns)


PLAIN_CODES = tl.constexpr(Codes())


@triton.jit
def _bf16_twice(scale, TYPE: tl.constexpr):
    """Stored scales as bf16, in both halves of 32 bits. fp32 scales aren't fine."""
    if TYPE == "e4m3":
        bits = decode_e4m3(scale).to(tl.uint32, bitcast=True)  # exact in bf16: the low half is 0
        return bits | (bits >> 16)
    elif cuda_capability_geq(9, 0):  # as below, two of four bytes at a time
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 even, odd, nan, least;
            mov.b32 least, 0x00400040;
            and.b32 even, $4, 0x00FF00FF;
            shr.u32 odd, $4, 8;
            and.b32 odd, odd, 0x00FF00FF;
            add.u32 nan, even, 0x00010001;
            shr.u32 nan, nan, 8;
            shl.b32 even, even, 7;
            max.u16x2 even, even, least;
            lop3.b32 even, nan, 0x00010001, even, 0xEA;  // (nan & 0x..01) | even
            add.u32 nan, odd, 0x00010001;
            shr.u32 nan, nan, 8;
            shl.b32 odd, odd, 7;
            max.u16x2 odd, odd, least;
            lop3.b32 odd, nan, 0x00010001, odd, 0xEA;
            prmt.b32 $0, even, even, 0x1010;
            prmt.b32 $1, odd, odd, 0x1010;
            prmt.b32 $2, even, even, 0x3232;
            prmt.b32 $3, odd, odd, 0x3232;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [scale],
            dtype=tl.uint32,
            is_pure=True,
            pack=4,
        )
    else:  # bf16 has its exponent; 2^-127 is subnormal there, and 255 means NaN
        byte = scale.to(tl.uint32)
        return tl.maximum(byte * 0x00800080, 0x00400040) | ((byte + 1) >> 8) * 0x00010001


@triton.jit
def _scaled_pairs(packed, scales):
    """Bytes of two e2m1 codes, and scales of `_bf16_twice` → 32 bits: two bf16, the first low.

    Magnitudes are looked up. `prmt` picks 4 of 8 bytes by 4 numbers of 3 bits, so the 8 magnitudes
    0, .5, 1, 1.5, 2, 3, 4, 6 as bf16 are two tables, of the high bytes and of the low ones. Half of
    a table has to be in a register. So that the assembler doesn't set it anew before each look-up
    (a tenth of the loop), the tables contain a zero that it can't see through: tid² / 2^32.
    """
    if cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 high_table, low_table, zero, first, index, sign, high, low, pair;
            mov.u32 zero, %tid.x;
            mul.hi.u32 zero, zero, zero;        // 0
            add.u32 high_table, zero, 0x3F3F3F00;
            add.u32 low_table, zero, 0xC0800000;
            mov.b32 zero, 0x80008000;           // -0, which changes no product; mul needs sm_90
            shl.b32 first, $4, 4;               // first codes of each byte, at its top
            and.b32 index, $4, 0x77777777;
            prmt.b32 sign, first, $4, 0x5140;   // codes 0 to 3, each at the top of a byte
            prmt.b32 high, high_table, 0x40404040, index;
            prmt.b32 low, low_table, 0xC0804000, index;
            lop3.b32 high, sign, 0x80808080, high, 0xEA;  // (sign & 0x80..) | high
            prmt.b32 pair, low, high, 0x5140;
            fma.rn.bf16x2 $0, pair, $5, zero;
            prmt.b32 pair, low, high, 0x7362;
            fma.rn.bf16x2 $1, pair, $6, zero;
            shr.b32 index, index, 16;
            prmt.b32 sign, first, $4, 0x7362;   // codes 4 to 7
            prmt.b32 high, high_table, 0x40404040, index;
            prmt.b32 low, low_table, 0xC0804000, index;
            lop3.b32 high, sign, 0x80808080, high, 0xEA;
            prmt.b32 pair, low, high, 0x5140;
            fma.rn.bf16x2 $2, pair, $7, zero;
            prmt.b32 pair, low, high, 0x7362;
            fma.rn.bf16x2 $3, pair, $8, zero;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r",
            [packed, scales],
            dtype=tl.uint32,
            is_pure=True,
            pack=4,
        )
    else:
        scale = (scales << 16).to(tl.float32, bitcast=True)
        first = decode_e2m1(packed.to(tl.int32) & 15) * scale  # exact in bf16: the rest is 0
        second = decode_e2m1(packed.to(tl.int32) >> 4) * scale
        second = second.to(tl.uint32, bitcast=True) & 0xFFFF0000
        return (first.to(tl.uint32, bitcast=True) >> 16) | second


@triton.jit
def numbers(codes, scale, CODES: tl.constexpr, dtype: tl.constexpr):
    """Bytes [n, m] of an e4m3 code, or of two e2m1 codes → [n, m or 2m] of `dtype`, times fine
    scales as they are stored, if there are some."""
    n: tl.constexpr = codes.shape[0]
    m: tl.constexpr = codes.shape[1]
    depth: tl.constexpr = m * (2 if CODES.packed else 1)
    blocks: tl.constexpr = depth // CODES.columns if CODES.is_fine else 1
    TYPE: tl.constexpr = CODES.scale_type
    if CODES.packed and dtype == tl.bfloat16 and not INTERPRETED:
        scale = _bf16_twice(scale, TYPE)[:, :, None]
        scale = tl.reshape(tl.broadcast_to(scale, (n, blocks, m // blocks)), (n, m))
        pairs = _scaled_pairs(codes, scale)
        first = pairs.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        second = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        x = tl.reshape(tl.join(first, second), (n, depth))
    else:
        x = decode_e2m1(unpack(codes)) if CODES.packed else decode_e4m3(codes)
        if CODES.is_fine:
            scale = decode_ue8m0(scale.to(tl.int32)) if TYPE == "e8m0" else decode_e4m3(scale)
            x = tl.reshape(x, (n, blocks, depth // blocks)) * scale[:, :, None]
            x = tl.reshape(x, (n, depth))
    return narrow(x, dtype)


@triton.jit
def add_block_scaled(acc, a, a_scale, w, w_scale, CODES: tl.constexpr):
    """acc + a · wᵀ, of codes and the scales of their blocks, in one instruction of the hardware."""
    A_TYPE: tl.constexpr = CODES.a_element
    W_TYPE: tl.constexpr = CODES.element
    if CODES.scale_type == "e4m3":
        a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
        w_scale = w_scale.to(tl.float8e4nv, bitcast=True)
    return tl.dot_scaled(a, a_scale, A_TYPE, w.T, w_scale, W_TYPE, acc)


@triton.jit
def _w_scale_ptrs(scales, expert, w_rows, CODES: tl.constexpr):
    """Where the scales of weight rows start."""
    ptr, strides = scales[1], scales[4]
    scale_rows = w_rows // CODES.rows if CODES.rows > 0 else w_rows * 0
    return ptr + expert.to(tl.int64) * strides[0] + scale_rows.to(tl.int64) * strides[1]


@triton.jit
def _load_fine(ptrs, stride, d, D, CODES: tl.constexpr, BLOCK_D: tl.constexpr):
    offs = tl.arange(0, BLOCK_D // CODES.columns)[None, :]
    ptrs = ptrs[:, None] + (d // CODES.columns + offs) * stride
    return tl.load(ptrs, mask=offs * CODES.columns < D - d, other=0)


@triton.jit
def load_fine_scales(scales, expert, w_rows, d, D, CODES: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of w [COLUMNS, BLOCK_D / 32 or 16], as they are stored, from depth d on."""
    ptrs = _w_scale_ptrs(scales, expert, w_rows, CODES)
    return _load_fine(ptrs, scales[4][2], d, D, CODES, BLOCK_D)


@triton.jit
def load_a_scales(scales, a_rows, d, D, CODES: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of a [BLOCK_M, BLOCK_D / 32 or 16]."""
    ptrs = scales[6] + a_rows.to(tl.int64) * scales[7][0]
    return _load_fine(ptrs, scales[7][1], d, D, CODES, BLOCK_D)


@triton.jit
def block_factor(
    scales, expert, a_rows, w_rows, block, tile_n, N,
    CODES: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, NARROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, COLUMNS]: a's scales times w's, for block number `block` of the depth."""
    COLUMNS: tl.constexpr = w_rows.shape[0]
    offset = block * scales[4][2]
    if CODES.half_shares:  # two loads instead of COLUMNS
        first = weight_rows(tile_n, 0, N, GATED, INTERLEAVED, BLOCK_N)
        second = weight_rows(tile_n, COLUMNS // 2, N, GATED, INTERLEAVED, BLOCK_N)
        first = tl.load(_w_scale_ptrs(scales, expert, first, CODES) + offset)
        second = tl.load(_w_scale_ptrs(scales, expert, second, CODES) + offset)
        of_w = tl.where(tl.arange(0, COLUMNS) < COLUMNS // 2, first, second)
    else:
        of_w = tl.load(_w_scale_ptrs(scales, expert, w_rows, CODES) + offset)
    factor = of_w[:, None] if NARROW else of_w[None, :]
    if scales[0] is not None:
        strides = scales[3]
        of_a = tl.load(scales[0] + a_rows.to(tl.int64) * strides[0] + block * strides[1])
        factor *= of_a[None, :] if NARROW else of_a[:, None]
    return factor


@triton.jit
def apply_whole_scales(scales, acc, expert, a_rows, w_rows, num_w_rows, CODES: tl.constexpr):
    """The sums [BLOCK_M, COLUMNS] times the scales that reach along all of the depth."""
    a_scale_ptr, w_scale_ptr, w_global_ptr, a_strides, _w_strides, global_strides = scales[:6]
    if w_scale_ptr is not None and CODES.columns == 0 and CODES.rows == 0:
        acc *= tl.load(_w_scale_ptrs(scales, expert, expert, CODES))
    elif w_scale_ptr is not None and CODES.columns == 0:
        acc *= tl.load(_w_scale_ptrs(scales, expert, w_rows, CODES))[None, :]
    if a_scale_ptr is not None and not CODES.is_blockwise:
        acc *= tl.load(a_scale_ptr + a_rows.to(tl.int64) * a_strides[0])[:, None]
    if w_global_ptr is not None:
        w_global_ptr += expert * global_strides[0]
        factor = tl.load(w_global_ptr)
        if CODES.global_halves:
            second = tl.load(w_global_ptr + global_strides[1])
            factor = tl.where(w_rows < tl.cdiv(num_w_rows, 2), factor, second)[None, :]
        acc *= factor
    return acc


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Three; 0 for a dimension that isn't there, and for the only number of a tensor."""
    return (*(() if x is None or x.numel() == 1 else x.stride()), 0, 0, 0)[:3]


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a GEMM's operands, as its launcher is told."""

    weight: Tensor | None = None  # (E, …) fp32, float8_e4m3fn or uint8 (e8m0); None: no codes
    weight_rows: int = 0  # so many rows and columns of w share a scale; 0: all
    weight_columns: int = 0
    weight_global: Tensor | None = None  # fp32, one number, (E,) or (E, halves of the rows)
    rows: Tensor | None = None  # of a: fp32 (), (rows,) or, of codes, (rows, cdiv(D, 128))
    packed: bool = False  # two codes in a byte of w
    row_blocks: Tensor | None = None  # of a's codes if w's scales are fine: stored as w's are
    a_packed: bool = False
    out: Tensor | None = None  # fp32, one number or (E,): static scales of the result, then e4m3
    out_blocks: Tensor | None = None  # (rows, cdiv(N, 128)) fp32, written by specialised tiles: of
    # the result, then e4m3

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Of a, w, all of w, a's blocks and the result, in the kernel's order."""
        stored, blocks = self.weight, self.row_blocks
        if stored is not None and stored.dtype != torch.float32:
            stored = stored.view(torch.uint8)
        if blocks is not None:
            blocks = blocks.view(torch.uint8)
        return self.rows, stored, self.weight_global, blocks, self.out

    @property
    def strides(self) -> tuple[tuple[int, ...] | int, ...]:
        """Of the same; 0 where one serves all."""
        of_weight = _strides(self.weight)
        if self.weight_rows == 0 and self.weight_columns > 0:
            of_weight = (of_weight[0], 0, of_weight[1])
        return (
            _strides(self.rows)[:2],
            of_weight,
            _strides(self.weight_global)[:2],
            _strides(self.row_blocks)[:2],
            _strides(self.out)[0],
        )

    def codes(self, half: int, up: int) -> Codes:
        """`half` of a tile's columns are consecutive rows of w, the other half too, or is `up` rows
        further down."""
        types = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e8m0"}
        return Codes(
            packed=self.packed,
            a_packed=self.a_packed,
            block_scaled=self.row_blocks is not None,
            scale_type="fp32" if self.weight is None else types.get(self.weight.dtype, "fp32"),
            rows=self.weight_rows,
            columns=self.weight_columns,
            a_columns=128 if self.rows is not None and self.rows.ndim == 2 else 0,
            global_halves=self.weight_global is not None and self.weight_global.ndim == 2,
            half_shares=0 < self.weight_rows and self.weight_rows % half == 0 and up % half == 0,
        )


PLAIN = Scales()
