"""Rounding to the small formats, in kernels: the same bits on any GPU and under the interpreter.

    e4m3   s eeee mmm   0, then 2^-9 … 448   bias 7, NaN 0x7F, no infinity
    e2m1   s ee m       0, .5, 1, 1.5, 2, 3, 4, 6   bias 1, neither NaN nor infinity
    ue8m0  eeeeeeee     2^(byte - 127)       NaN 0xFF

One trick does all rounding to nearest even: a sum of fp32 numbers is rounded to the step of its
result, so adding 1.5 · 2^23 steps (and taking it away) rounds to a multiple of a step.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.target_info import cuda_capability_geq

from tmoe.kernels.casts import INTERPRETED

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
ROUND = tl.constexpr(1.5 * 2**23)  # fp32 numbers near it are 1 apart; its bits:
ROUND_BITS = tl.constexpr(0x4B400000)


def _sum_of_rounds(per_word: int) -> tl.constexpr:
    """What ROUND_BITS makes of a word of so many codes, as an int32."""
    total = sum(ROUND_BITS.value << (4 * i) for i in range(per_word)) & 0xFFFFFFFF
    return tl.constexpr(total - (total >> 31 << 32))


ROUND_SUM_8, ROUND_SUM_2 = _sum_of_rounds(8), _sum_of_rounds(2)
TINY = tl.constexpr(2.0**-64)
HUGE = tl.constexpr(2.0**64)
E4M3_MAX = tl.constexpr(448.0)
E2M1_MAX = tl.constexpr(6.0)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def with_sign(magnitude, x):
    """`magnitude` (not negative) with the sign bit of x."""
    if INTERPRETED:
        return from_bits(bits_of(magnitude) | (bits_of(x) & -0x80000000))
    else:
        return libdevice.copysign(magnitude, x)


@triton.jit
def at_most(a, limit, KEEP_NAN: tl.constexpr):
    """min(a, limit). A NaN `a` stays one, or else becomes `limit`."""
    if KEEP_NAN:
        return tl.minimum(a, limit, propagate_nan=tl.PropagateNan.ALL)
    elif INTERPRETED:  # where minimum always keeps a NaN
        return tl.where(a < limit, a, limit)
    else:
        return tl.minimum(a, limit)


@triton.jit
def larger(a, b):
    """max(a, b), NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax(x, axis: tl.constexpr, keep_dims: tl.constexpr = True):
    """max |x| along an axis, or of all for None. NaN if one of them is."""
    if INTERPRETED:  # its max skips NaN; as integers magnitudes keep their order, and NaN is last
        return from_bits(tl.max(bits_of(tl.abs(x)), axis, keep_dims=keep_dims))
    else:
        return tl.reduce(tl.abs(x), axis, larger, keep_dims=keep_dims)


@triton.jit
def divide(x, d, LIMIT: tl.constexpr, KEEP_NAN: tl.constexpr):
    """min(|x| / d, LIMIT), good enough to be rounded. d ≥ 0, and 0 counts as 1. KEEP_NAN as for
    `at_most`.

    x [..., n] is divided by few different d [..., 1]. A correctly rounded division takes some ten
    instructions per element. Here a reciprocal is worked out once per d, in two parts whose sum is
    exact to 2^-48, and an element costs a product and a fused multiply-add. Rounded to e4m3 or e2m1
    the result is that of the correctly rounded quotient: `tests/kernels/test_rounding.py` has a GPU
    check it next to every midpoint for each of the 2^23 mantissas of d.
    """
    d = tl.where(d == 0.0, 1.0, d)
    if INTERPRETED:
        return at_most(tl.div_rn(tl.abs(x), d), LIMIT, KEEP_NAN)
    else:
        unit = tl.where(d < TINY, HUGE, tl.where(d > HUGE, TINY, 1.0))  # away from fp32's ends
        unit = tl.where(d > LARGEST, 0.0, unit)  # x / inf: 0, or NaN
        d = tl.where(d > LARGEST, 1.0, d * unit)
        y = 1.0 / d  # a few units in the last place off
        y = tl.fma(tl.fma(-d, y, 1.0), y, y)
        error = tl.fma(-d, y, 1.0)
        rest = error * y
        rest = tl.fma(rest * 1.0001, error, rest)  # 1.0001 decides a tie as the next term would
        a = at_most(tl.abs(x) * unit, d * LIMIT, KEEP_NAN)  # before anything overflows
        return tl.fma(a, y, a * rest)


@triton.jit
def encode_e4m3(x):
    """fp32 → e4m3 byte, to nearest even; beyond 448 saturates, NaN is 0x7F."""
    if not INTERPRETED and cuda_capability_geq(8, 9):
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        a = at_most(tl.abs(x), E4M3_MAX, True)
        power = from_bits(bits_of(tl.maximum(a, 0.015625)) & 0x7F800000)  # 2^-6: the least normal
        steps = power * (1.5 * 2**20)  # 1.5 · 2^23 steps of power / 8
        grid = (a + steps) - steps
        code = bits_of(grid * 2.0**-120) >> 20  # biases differ by 120, mantissas by 20 bits
        code = code | ((bits_of(x) >> 24) & 0x80)
        return tl.where(a == a, code, 0x7F).to(tl.uint8)


@triton.jit
def e4m3_scale(largest):
    """The fp32 scale under which a block's largest magnitude becomes 448, correctly rounded; 1 for
    a block of zeros."""
    scale = tl.div_rn(largest, E4M3_MAX)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def e4m3_codes(x, scale):
    """e4m3 bytes of x / scale, to nearest even. Few different scales, [..., 1], as for `divide`."""
    return encode_e4m3(with_sign(divide(x, scale, E4M3_MAX, KEEP_NAN=True), x))


@triton.jit
def decode_e4m3(code):
    """e4m3 byte → fp32, exact."""
    if not INTERPRETED and cuda_capability_geq(8, 9):
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = code.to(tl.int32)
        a = from_bits((code & 0x7F) << 20) * 2.0**120
        a = tl.where((code & 0x7F) == 0x7F, float("nan"), a)
        return from_bits(bits_of(a) | ((code & 0x80) << 24))


@triton.jit
def encode_e2m1(a, x):
    """ROUND_BITS + the 4-bit code of a magnitude a ≤ 6 and the sign of x, to nearest even; int32.

    The codes 0 … 7 are 0, .5, 1, 1.5, 2, 3, 4, 6. As a function of the value the code is a bent
    line: 2a up to 2, a + 2 up to 4, a / 2 + 4 up to 6. Each piece is rounded to an integer by
    adding it to ROUND, and the least of the three counts. The sign is bit 3: ROUND + 4 + code, less
    ±4, is ROUND + code, or ROUND + code + 8.
    """
    low = bits_of(tl.fma(a, 2.0, ROUND + 4.0))
    middle = bits_of(a + (ROUND + 6.0))
    high = bits_of(tl.fma(a, 0.5, ROUND + 8.0))
    code = from_bits(tl.minimum(low, tl.minimum(middle, high)))
    return bits_of(code - with_sign(tl.full(x.shape, 4.0, tl.float32), x))


@triton.jit
def decode_e2m1(code):
    """4-bit code (int32) → fp32, exact."""
    a = from_bits((code & 7) << 22) * 2.0**126  # biases differ by 126, mantissas by 22 bits
    return from_bits(bits_of(a) | ((code & 8) << 28))


@triton.jit
def pack(codes, PER_WORD: tl.constexpr):
    """Codes of `encode_e2m1` [n, m] → words [n, m / PER_WORD], int32, the first in the lowest bits.

    ROUND_BITS is taken off the sum, once: what doesn't fit 32 bits is gone in both.
    """
    n: tl.constexpr = codes.shape[0]
    m: tl.constexpr = codes.shape[1]
    codes = tl.reshape(codes, (n, m // PER_WORD, PER_WORD))
    words = tl.sum(codes << (4 * tl.arange(0, PER_WORD))[None, None, :], axis=2)
    return words - (ROUND_SUM_8 if PER_WORD == 8 else ROUND_SUM_2)


@triton.jit
def unpack(packed):
    """Bytes [n, m] → 4-bit codes [n, 2m] (int32): the low half of a byte comes first."""
    n: tl.constexpr = packed.shape[0]
    m: tl.constexpr = packed.shape[1]
    packed = packed.to(tl.int32)
    return tl.reshape(tl.join(packed & 15, packed >> 4), (n, 2 * m))


@triton.jit
def encode_ue8m0(largest, ROUND_UP: tl.constexpr, EXPONENT: tl.constexpr):
    """ue8m0 byte (int32) for a block whose largest magnitude is `largest`.

    The scale is 2^(exponent of `largest` - EXPONENT), EXPONENT being that of the element type's
    maximum. ROUND_UP is added to the mantissa first; the rules differ in when it carries over
    (`scale_rounding`). Stays within 2^-127 … 2^127; an infinity gives 2^127, a NaN 0xFF.
    """
    bits = bits_of(largest)
    byte = tl.maximum(((bits + ROUND_UP) >> 23) - EXPONENT, 0)
    byte = tl.where(bits == 0x7F800000, 254, byte)
    return tl.where(bits > 0x7F800000, 255, byte)


@triton.jit
def decode_ue8m0(byte):
    """ue8m0 byte (int32) → fp32, exact."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)  # 2^-127 is subnormal in fp32
    return from_bits(tl.where(byte == 255, 0x7FC00000, bits))


@triton.jit
def reciprocal_ue8m0(byte):
    """1 / decode_ue8m0(byte), exact."""
    return decode_ue8m0(tl.where(byte == 255, 255, 254 - byte))


EXPONENTS = {"e4m3": 8, "e2m1": 2}  # of 448 and 6


def scale_rounding(element: str, rule: str) -> dict[str, int]:
    """ROUND_UP and EXPONENT of `encode_ue8m0`.

    floor: the maximum's exponent counts, as in the OCP text. even: its mantissa is rounded to one
    bit first, and may carry. ceil: the least scale under which the maximum fits, so it carries when
    the mantissa is beyond that of 448 = 1.75 · 2^8 or 6 = 1.5 · 2^2.
    """
    mantissa = {"e4m3": 0x600000, "e2m1": 0x400000}[element]
    round_up = {"floor": 0, "even": 1 << 21, "ceil": 0x7FFFFF - mantissa}[rule]
    return {"ROUND_UP": round_up, "EXPONENT": EXPONENTS[element]}
