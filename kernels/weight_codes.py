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
from tmoe.kernels.rounding import decode_e2m1, decode_e4m3, decode_ue8m0, unpack


@triton.jit
def decode_scale(scale, TYPE: tl.constexpr):
    """Scales as they are stored, fp32 or bytes, in fp32."""
    if TYPE == "e4m3":
        return decode_e4m3(scale)
    elif TYPE == "e8m0":
        return decode_ue8m0(scale.to(tl.int32))
    else:
        return scale


@triton.jit
def scale_ptrs(w_scale_ptr, w_scale_strides, expert, w_rows, SCALE_N: tl.constexpr):
    """Where the scales of weight rows start; SCALE_N of them share one, or, if 0, all do."""
    scale_rows = w_rows // SCALE_N if SCALE_N > 0 else w_rows * 0
    w_scale_ptr += expert.to(tl.int64) * w_scale_strides[0]
    return w_scale_ptr + scale_rows.to(tl.int64) * w_scale_strides[1]


@triton.jit
def _pairs(packed):
    """Bytes of two e2m1 codes → 32 bits: both as bf16 times 2^-126, the first in the low half.

    Nothing has to be worked out: e2m1's exponent and mantissa, moved to where bf16's two end, are
    the number times 2^-126, since the biases differ by 126. That holds for the subnormal .5 too.
    """
    if cuda_capability_geq(8, 0):
        # Four bytes at once. `prmt` moves a code to the top of each half, the rest is masked out.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, pair, magnitude;
            shl.b32 low, $4, 4;
            prmt.b32 pair, low, $4, 0x4000;
            shr.b32 magnitude, pair, 6;
            and.b32 magnitude, magnitude, 0x01C001C0;
            lop3.b32 $0, pair, 0x80008000, magnitude, 0xEA;
            prmt.b32 pair, low, $4, 0x5111;
            shr.b32 magnitude, pair, 6;
            and.b32 magnitude, magnitude, 0x01C001C0;
            lop3.b32 $1, pair, 0x80008000, magnitude, 0xEA;
            prmt.b32 pair, low, $4, 0x6222;
            shr.b32 magnitude, pair, 6;
            and.b32 magnitude, magnitude, 0x01C001C0;
            lop3.b32 $2, pair, 0x80008000, magnitude, 0xEA;
            prmt.b32 pair, low, $4, 0x7333;
            shr.b32 magnitude, pair, 6;
            and.b32 magnitude, magnitude, 0x01C001C0;
            lop3.b32 $3, pair, 0x80008000, magnitude, 0xEA;
            }""",
            "=r,=r,=r,=r,r",
            [packed],
            dtype=tl.uint32,
            is_pure=True,
            pack=4,
        )
    else:
        both = packed.to(tl.uint32)
        both = (both | (both << 12)) & 0x000F000F  # a code at the bottom of each half
        return ((both << 12) & 0x80008000) | ((both << 6) & 0x01C001C0)


@triton.jit
def numbers(codes, scale, PACKED: tl.constexpr, SCALE_D: tl.constexpr, dtype: tl.constexpr):
    """Bytes [n, m] of an e4m3 code, or PACKED of two e2m1 codes → [n, m or 2m] of `dtype`; times
    their scales [n, … / SCALE_D], fp32, if SCALE_D > 0."""
    n: tl.constexpr = codes.shape[0]
    depth: tl.constexpr = codes.shape[1] * (2 if PACKED else 1)
    if PACKED and dtype == tl.bfloat16 and not INTERPRETED:
        pairs = _pairs(codes)
        low = pairs.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        x = tl.reshape(tl.join(low, high), (n, depth)) * tl.full((), 2.0**126, tl.bfloat16)
        scale = scale.to(tl.bfloat16)
    elif PACKED:
        x = decode_e2m1(unpack(codes))
    else:
        x = decode_e4m3(codes)
    if SCALE_D > 0:
        x = tl.reshape(x, (n, depth // SCALE_D, SCALE_D)) * scale[:, :, None]
        x = tl.reshape(x, (n, depth))
    return narrow(x, dtype)


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a GEMM's operands, as its launcher is told."""

    weight: Tensor | None = None  # (E, …) fp32, float8_e4m3fn or uint8 (e8m0); None: no codes
    weight_rows: int = 0  # so many rows and columns of w share a scale; 0: all
    weight_columns: int = 0
    weight_global: Tensor | None = None  # fp32, one number, (E,) or (E, halves of the rows)
    rows: Tensor | None = None  # of a: fp32 (), (rows,) or, of codes, (rows, cdiv(D, 128))
    packed: bool = False  # two codes in a byte of w

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those of a and of w, and the global ones, in the kernel's order."""
        stored = self.weight
        if stored is not None and stored.dtype != torch.float32:
            stored = stored.view(torch.uint8)
        return self.rows, stored, self.weight_global

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """Of the same; 0 where one serves all."""
        of_rows = () if self.rows is None else self.rows.stride()
        of_weight = () if self.weight is None else self.weight.stride()
        if self.weight_rows == 0 and self.weight_columns > 0:
            of_weight = (of_weight[0], 0, of_weight[1])
        of_all = self.weight_global
        of_all = () if of_all is None or of_all.numel() == 1 else of_all.stride()
        return (*of_rows, 0, 0)[:2], (*of_weight, 0, 0, 0)[:3], (*of_all, 0, 0)[:2]

    def constants(self, half: int, up: int) -> dict[str, object]:
        """`half` of a tile's columns are consecutive rows of w, the other half too, or is `up` rows
        further down."""
        types = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e8m0"}
        return {
            "PACKED": self.packed,
            "SCALE_TYPE": "fp32" if self.weight is None else types.get(self.weight.dtype, "fp32"),
            "SCALE_N": self.weight_rows,
            "SCALE_D": self.weight_columns,
            "A_SCALE_D": 128 if self.rows is not None and self.rows.ndim == 2 else 0,
            "HALF_SHARES": self.weight_rows % half == 0 and up % half == 0,
        }


PLAIN = Scales()
