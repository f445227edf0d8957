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

from tmoe.kernels.casts import narrow
from tmoe.kernels.e2m1_pairs import scaled_pairs, unfold, warps_apart, warps_together
from tmoe.kernels.gemm_tile import weight_rows
from tmoe.kernels.launch import is_nvidia
from tmoe.kernels.rounding import decode_e2m1, decode_e4m3, decode_ue8m0, unpack


@dataclass(frozen=True, slots=True)
class Codes:
    """What a kernel is compiled for: where the codes are, and how far a scale reaches."""

    packed: bool = False  # two codes in a byte of w
    a_packed: bool = False  # and in a byte of a
    in_pairs: bool = False  # w's become bf16 as `e2m1_pairs.py` has it
    block_scaled: bool = False  # both are multiplied as codes, together with their fine scales
    scale_type: str = "fp32"  # of w's scales as they are stored: "fp32", "e4m3", "e8m0"
    scales_in_twos: bool = False  # two of w's in an int16
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
def numbers(
    codes, scale, CODES: tl.constexpr, dtype: tl.constexpr, IN_THREAD_ORDER: tl.constexpr = False
):
    """Bytes [n, m] of an e4m3 code, or of two e2m1 codes → [n, m or 2m] of `dtype`, times fine
    scales as they are stored, if there are some."""
    n: tl.constexpr = codes.shape[0]
    m: tl.constexpr = codes.shape[1]
    depth: tl.constexpr = m * (2 if CODES.packed else 1)
    TYPE: tl.constexpr = CODES.scale_type
    if CODES.in_pairs:
        return scaled_pairs(codes, scale, TYPE, IN_THREAD_ORDER)
    x = decode_e2m1(unpack(codes)) if CODES.packed else decode_e4m3(codes)
    if CODES.is_fine:
        blocks: tl.constexpr = depth // CODES.columns
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
def _load_fine(ptrs, stride, d, D, CODES: tl.constexpr, BLOCK_D: tl.constexpr, TWOS: tl.constexpr):
    """Scales [n, BLOCK_D / 32 or 16] of rows that start at `ptrs` [n]; TWOS: stored in int16."""
    COLUMNS: tl.constexpr = CODES.columns * (2 if TWOS else 1)  # of a load
    offs = tl.arange(0, BLOCK_D // COLUMNS)[None, :]
    ptrs = ptrs[:, None] + (d // COLUMNS + offs) * stride
    scale = tl.load(ptrs, mask=offs * COLUMNS < D - d, other=0)
    if TWOS:
        scale = tl.join(scale.to(tl.uint8), (scale >> 8).to(tl.uint8))
        scale = tl.reshape(scale, (ptrs.shape[0], BLOCK_D // CODES.columns))
    return scale


@triton.jit
def load_fine_scales(
    scales, expert, w_rows, d, D,
    CODES: tl.constexpr, BLOCK_D: tl.constexpr, IN_THREAD_ORDER: tl.constexpr,
):  # fmt: skip
    """Of w [COLUMNS, BLOCK_D / 32 or 16], as they are stored, from depth d on."""
    TWOS: tl.constexpr = CODES.scales_in_twos
    if IN_THREAD_ORDER:
        w_rows = warps_together(w_rows)
    ptrs = _w_scale_ptrs(scales, expert, w_rows, CODES)
    scale = _load_fine(ptrs, scales[4][2], d, D, CODES, BLOCK_D, TWOS)
    return warps_apart(scale) if IN_THREAD_ORDER else scale


@triton.jit
def load_a_scales(scales, a_rows, d, D, CODES: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of a [BLOCK_M, BLOCK_D / 32 or 16]."""
    ptrs = scales[6] + a_rows.to(tl.int64) * scales[7][0]
    return _load_fine(ptrs, scales[7][1], d, D, CODES, BLOCK_D, False)


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
    TYPE: tl.constexpr = CODES.scale_type
    if CODES.in_pairs:
        acc = unfold(acc, TYPE)
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
    def _stored(self) -> Tensor | None:
        """w's as they are loaded. A thread that decodes has 32 codes in a row at a time: of scales
        for 16 it needs two, and loads them at once if they are aligned."""
        w = self.weight
        if w is None or w.dtype == torch.float32:
            return w
        w = w.view(torch.uint8)
        twos = self.weight_columns == 16 and w.stride(-1) == 1 and w.shape[-1] % 2 == 0
        starts = (*w.stride()[:-1], w.storage_offset())
        return w.view(torch.int16) if twos and all(x % 2 == 0 for x in starts) else w

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Of a, w, all of w, a's blocks and the result, in the kernel's order."""
        stored, blocks = self._stored, self.row_blocks
        if blocks is not None:
            blocks = blocks.view(torch.uint8)
        return self.rows, stored, self.weight_global, blocks, self.out

    @property
    def strides(self) -> tuple[tuple[int, ...] | int, ...]:
        """Of the same; 0 where one serves all."""
        of_weight = _strides(self._stored)
        if self.weight_rows == 0 and self.weight_columns > 0:
            of_weight = (of_weight[0], 0, of_weight[1])
        return (
            _strides(self.rows)[:2],
            of_weight,
            _strides(self.weight_global)[:2],
            _strides(self.row_blocks)[:2],
            _strides(self.out)[0],
        )

    def codes(self, a: Tensor, half: int, up: int) -> Codes:
        """Of w and a. `half` of a tile's columns are consecutive rows of w, the other half too, or
        is `up` rows further down."""
        types = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e8m0"}
        return Codes(
            packed=self.packed,
            a_packed=self.a_packed,
            in_pairs=self.packed and a.dtype == torch.bfloat16 and is_nvidia(a.device),
            block_scaled=self.row_blocks is not None,
            scale_type="fp32" if self.weight is None else types.get(self.weight.dtype, "fp32"),
            scales_in_twos=self._stored is not None and self._stored.dtype == torch.int16,
            rows=self.weight_rows,
            columns=self.weight_columns,
            a_columns=128 if self.rows is not None and self.rows.ndim == 2 else 0,
            global_halves=self.weight_global is not None and self.weight_global.ndim == 2,
            half_shares=0 < self.weight_rows and self.weight_rows % half == 0 and up % half == 0,
        )


PLAIN = Scales()
