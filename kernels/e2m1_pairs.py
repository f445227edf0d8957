"""e2m1 codes become bf16, two at a time, in as few instructions as NVIDIA's tensor cores need.

A loop over FP4 weights is bound by instructions, not by memory: with few rows each code is decoded
for one or two products. Three things keep them few:

    units         A multiprocessor does 64 bit operations per cycle, or table look-ups, but 128
                  multiplications. Shifts to the left are multiplications to the assembler.
    subnormals    The three bits of a magnitude, put where bf16 has the end of its exponent and the
                  first bit of its mantissa, are the number times 2^-126, 0.5 included. The product
                  with the scale, which is there anyway, makes up for it: `FOLD`.
    order         A sum over the depth may be taken in any order. `in_thread_order` is one in which
                  a thread has 32 codes in a row, so that it needs few scales, and which pairs codes
                  that are 16 bits apart in a word, as they come.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tmoe.kernels.casts import INTERPRETED
from tmoe.kernels.rounding import decode_e4m3

# A scale is multiplied by FOLD, a sum of the tensor cores by UNFOLD, and FOLD · UNFOLD is 2^126. A
# scale times FOLD has to fit bf16, which is no matter for e4m3 (up to 448). Of e8m0, scales beyond
# 2^33 count as NaN, and numbers below 2^-94 may be taken for 0.
FOLD_E4M3, UNFOLD_E4M3 = tl.constexpr(2.0**118), tl.constexpr(2.0**8)
FOLD_E8M0 = tl.constexpr("0x6E806E80")  # 2^94, twice
UNFOLD_E8M0 = tl.constexpr(2.0**32)


def _pairs_asm(prepare: str) -> tl.constexpr:
    """Of a word $4 with 8 codes and 4 scales $5 … $8: 4 pairs.

    `prepare` sets q0 and q1 so that their bytes begin with the codes, and v0 and v1, which are q0
    and q1 shifted right by 6 as far as a magnitude is concerned. Bytes 0 and 2 make a pair (x0, x2)
    and bytes 1 and 3 (x1, x3). s has the signs of all four: a `lop3`, here a choice of bits, takes
    bits 6 to 8 of both halves from the magnitude and with the others one sign for each.
    """
    return tl.constexpr(f"""{{
        .reg .b32 q0, q1, v0, v1, s, x0, x1, x2, x3, zero;
        mov.b32 zero, 0x80008000;      // -0, which changes no product; mul needs sm_90
        shl.b32 q0, $4, 4;
        {prepare}
        and.b32 s, q0, 0x80808080;
        lop3.b32 x1, s, v0, 0x01C001C0, 0xD8;
        shl.b32 s, s, 8;
        shl.b32 q0, q0, 2;
        lop3.b32 x0, s, q0, 0x01C001C0, 0xD8;
        and.b32 s, q1, 0x80808080;
        lop3.b32 x3, s, v1, 0x01C001C0, 0xD8;
        shl.b32 s, s, 8;
        shl.b32 q1, q1, 2;
        lop3.b32 x2, s, q1, 0x01C001C0, 0xD8;
        fma.rn.bf16x2 $0, x0, $5, zero;
        fma.rn.bf16x2 $1, x1, $6, zero;
        fma.rn.bf16x2 $2, x2, $7, zero;
        fma.rn.bf16x2 $3, x3, $8, zero;
        }}""")


# Pairs of neighbours: the codes of the low halves of bytes meet those of the high halves.
NEIGHBOURS = _pairs_asm("""
        prmt.b32 q1, q0, $4, 0x7632;
        prmt.b32 q0, q0, $4, 0x5410;
        shr.u32 v1, q1, 6;
        shr.u32 v0, q0, 6;""")
# Codes 0 4, 2 6, 1 5, 3 7: two instructions less.
APART = _pairs_asm("""
        mov.b32 q1, $4;
        shr.u32 v1, q1, 6;
        shl.b32 v0, v1, 4;""")
# Four e8m0 bytes, each as bf16 in both halves of a word. bf16 has the same exponent, but 2^-127 is
# subnormal, and 255 means NaN: infinity times 0.
E8M0_TWICE = tl.constexpr(f"""{{
        .reg .b32 even, odd, least, fold, zero;
        mov.b32 least, 0x00400040;
        mov.b32 fold, {FOLD_E8M0.value};
        mov.b32 zero, 0x80008000;
        shl.b32 even, $4, 7;
        shr.u32 odd, $4, 1;
        and.b32 even, even, 0x7F807F80;
        and.b32 odd, odd, 0x7F807F80;
        max.bf16x2 even, even, least;
        max.bf16x2 odd, odd, least;
        fma.rn.bf16x2 even, even, fold, zero;
        fma.rn.bf16x2 odd, odd, fold, zero;
        fma.rn.bf16x2 even, even, zero, even;
        fma.rn.bf16x2 odd, odd, zero, odd;
        prmt.b32 $0, even, even, 0x1010;
        prmt.b32 $1, odd, odd, 0x1010;
        prmt.b32 $2, even, even, 0x3232;
        prmt.b32 $3, odd, odd, 0x3232;
        }}""")


@triton.jit
def _twice(scale, TYPE: tl.constexpr):
    """Stored scales times FOLD as bf16, in both halves of 32 bits."""
    if TYPE == "e4m3":
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [decode_e4m3(scale) * FOLD_E4M3],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            E8M0_TWICE, "=&r,=&r,=&r,=&r,r", [scale], dtype=tl.uint32, is_pure=True, pack=4
        )


@triton.jit
def scaled_pairs(codes, scale, TYPE: tl.constexpr, IN_THREAD_ORDER: tl.constexpr):
    """Bytes [n, m] of two codes, and stored scales [n, blocks] → bf16 [n, 2m], which the tensor
    cores are to multiply. Their sums lack a factor: see `unfold`."""
    n: tl.constexpr = codes.shape[0]
    m: tl.constexpr = codes.shape[1]
    blocks: tl.constexpr = scale.shape[1]
    scale = tl.broadcast_to(_twice(scale, TYPE)[:, :, None], (n, blocks, m // blocks))
    pairs = tl.inline_asm_elementwise(
        APART if IN_THREAD_ORDER else NEIGHBOURS, "=r,=r,=r,=r,r,r,r,r,r",
        [codes, tl.reshape(scale, (n, m))], dtype=tl.uint32, is_pure=True, pack=4,
    )  # fmt: skip
    first = pairs.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    second = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    x = tl.join(first, second)
    if IN_THREAD_ORDER:
        x = tl.reshape(x, (n, 4, m // 16, 8)).permute(0, 2, 1, 3)
    return tl.reshape(x, (n, 2 * m))


@triton.jit
def unfold(acc, TYPE: tl.constexpr):
    """What products of `scaled_pairs` add up to → what they are of."""
    return acc * (UNFOLD_E4M3 if TYPE == "e4m3" else UNFOLD_E8M0)


@triton.jit
def in_thread_order(x):
    """x [m, d] with its columns in the order in which `scaled_pairs` has the depth.

    An operand of a warp's matmul instructions lies in its threads so that 4 of them share a row,
    each with 8 of 32 columns. Here each of the 4 gets consecutive columns, and of 8 columns
    0 4 2 6 1 5 3 7.
    """
    m: tl.constexpr = x.shape[0]
    d: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (m, 4, d // 32, 2, 2, 2)).permute(0, 2, 1, 5, 4, 3)
    return tl.reshape(x, (m, d))


@triton.jit
def warps_together(x):
    """Rows x [n] such that the k-th is loaded where the k-th row of `warps_apart` is needed.

    Of a loaded tile each warp has 8 rows, then comes the next; of an operand of the tensor cores it
    has 16. So that scales needn't move from warp to warp, they are loaded in another order.
    """
    n: tl.constexpr = x.shape[0]
    WARPS: tl.constexpr = 1 if INTERPRETED else tl.extra.cuda.num_warps()
    if WARPS > 1 and n % (16 * WARPS) == 0:
        x = tl.reshape(x, (n // 16 // WARPS, WARPS, 2, 8)).permute(0, 2, 1, 3)
        x = tl.reshape(x, (n,))
    return x


@triton.jit
def warps_apart(x):
    """Rows x [n, m] in their own order again."""
    n: tl.constexpr = x.shape[0]
    m: tl.constexpr = x.shape[1]
    WARPS: tl.constexpr = 1 if INTERPRETED else tl.extra.cuda.num_warps()
    if WARPS > 1 and n % (16 * WARPS) == 0:
        x = tl.reshape(x, (n // 16 // WARPS, 2, WARPS, 8, m)).permute(0, 2, 1, 3, 4)
        x = tl.reshape(x, (n, m))
    return x
