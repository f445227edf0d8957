"""The rounding helpers one by one: all codes, all ties, every exponent, and what is no number."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.quantize_inputs import E2M1, E4M3, midpoints, neighbours, same_bits
from tmoe.kernels.quantize_ref import (
    ELEMENT_MAX,
    decode_e2m1_ref,
    decode_ue8m0_ref,
    encode_e2m1_ref,
    encode_ue8m0_ref,
    pack_ref,
)
from tmoe.kernels.rounding import (
    ROUND_BITS,
    amax,
    at_most,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    divide,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    pack,
    reciprocal_ue8m0,
    scale_rounding,
    unpack,
)

NAN, INF = math.nan, math.inf


@triton.jit
def _map_kernel(out_ptr, x_ptr, n, NAME: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0)
    if NAME == "encode_e4m3":
        y = encode_e4m3(x)
    elif NAME == "decode_e4m3":
        y = decode_e4m3(x)
    elif NAME == "encode_e2m1":
        y = encode_e2m1(at_most(tl.abs(x), 6.0, False), x) - ROUND_BITS
    elif NAME == "decode_e2m1":
        y = decode_e2m1(x)
    elif NAME == "decode_ue8m0":
        y = decode_ue8m0(x)
    else:
        y = reciprocal_ue8m0(x)
    tl.store(out_ptr + offs, y, mask=offs < n)


def run(name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _map_kernel[(triton.cdiv(x.numel(), 4096),)](out, x, x.numel(), NAME=name, BLOCK=4096)
    return out.cpu()


def hard_numbers(values: torch.Tensor) -> torch.Tensor:
    """Codes, ties and their neighbours, every exponent, random bits, and what is no number."""
    bits = torch.randint(-(2**31), 2**31, (20000,), dtype=torch.int64).int().view(torch.float32)
    exponents = torch.ldexp(torch.ones(277), torch.arange(-149, 128))
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, -NAN])
    random = torch.randn(5000) * 100
    return torch.cat(
        (neighbours(values), midpoints(values), neighbours(exponents), special, bits, random)
    )


def test_e4m3_encode(device):
    x = hard_numbers(E4M3)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    got = run("encode_e4m3", x.to(device), torch.uint8)
    assert same_bits(got.view(torch.float8_e4m3fn), want)


def test_e4m3_all_256_bytes(device):
    """Decoded as torch does, and back to the same byte."""
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = run("decode_e4m3", bytes_.to(device), torch.float32)
    want = bytes_.view(torch.float8_e4m3fn)
    assert same_bits(values, want.float())
    back = run("encode_e4m3", values.to(device), torch.uint8)
    assert same_bits(back.view(torch.float8_e4m3fn), want)


def test_e2m1_encode(device):
    """Ties go to the even code, the sign survives, -0 included, and what is no number saturates."""
    x = hard_numbers(E2M1)
    magnitude = x.abs().nan_to_num(6.0).clamp(max=6.0)
    got = run("encode_e2m1", x.to(device), torch.int32)
    assert torch.equal(got, encode_e2m1_ref(magnitude, x).int())
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0, -0.25, -5.0])
    got = run("encode_e2m1", ties.to(device), torch.int32)
    assert got.tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 8, 14]


def test_e2m1_all_codes(device):
    codes = torch.arange(16, dtype=torch.int32)
    values = run("decode_e2m1", codes.to(device), torch.float32)
    assert same_bits(values, torch.cat((E2M1, -E2M1)))
    assert torch.equal(run("encode_e2m1", values.to(device), torch.int32), codes)


def test_ue8m0_all_bytes(device):
    """QN20: byte 0 is 2^-127, not 0; 255 is NaN."""
    byte = torch.arange(256, dtype=torch.int32)
    want = torch.ldexp(torch.ones(256), byte - 127)
    want[255] = NAN
    assert same_bits(run("decode_ue8m0", byte.to(device), torch.float32), want)
    assert same_bits(decode_ue8m0_ref(byte.to(torch.uint8)), want)
    assert same_bits(run("reciprocal_ue8m0", byte.to(device), torch.float32), 1 / want)


@triton.jit
def _encode_ue8m0_kernel(
    out_ptr, x_ptr, n, ROUND_UP: tl.constexpr, EXPONENT: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(out_ptr + offs, encode_ue8m0(x, ROUND_UP, EXPONENT), mask=offs < n)


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_ue8m0_of_a_maximum(element, rule, device):
    """At every exponent, around the mantissas where a rule carries over."""
    mantissas = torch.tensor([1.0, 1.25, 1.5, 1.75, 1.875])
    powers = torch.ldexp(torch.ones(277), torch.arange(-149, 128))
    x = (mantissas[:, None] * powers).flatten()
    special = torch.tensor([0.0, INF, NAN, torch.finfo(torch.float32).max])
    x = torch.cat((neighbours(x).abs(), special)).to(device)
    got = torch.empty(x.shape, dtype=torch.int32, device=device)
    _encode_ue8m0_kernel[(1,)](got, x, len(x), BLOCK=16384, **scale_rounding(element, rule))
    assert torch.equal(got.cpu(), encode_ue8m0_ref(x.cpu(), element, rule).int())


def test_the_rules_by_hand():
    """448 · 2^k and its neighbours: where floor saturates, ceil doubles, and even doubles early."""
    above, below = (torch.nextafter(torch.tensor(448.0), torch.tensor(to)) for to in (INF, 0.0))
    x = torch.stack((below, torch.tensor(448.0), above, torch.tensor(500.0), torch.tensor(512.0)))
    bytes_ = {r: encode_ue8m0_ref(x, "e4m3", r).tolist() for r in ("floor", "even", "ceil")}
    assert bytes_ == {
        "floor": [127, 127, 127, 127, 128],
        "even": [127, 128, 128, 128, 128],
        "ceil": [127, 127, 128, 128, 128],  # QN06
    }
    largest = ELEMENT_MAX["e2m1"]
    x = torch.tensor([5.0, largest, 6.5, 7.0, 8.0])
    bytes_ = {r: encode_ue8m0_ref(x, "e2m1", r).tolist() for r in ("floor", "even", "ceil")}
    assert bytes_ == {
        "floor": [127, 127, 127, 127, 128],
        "even": [127, 127, 127, 128, 128],
        "ceil": [127, 127, 128, 128, 128],
    }


@triton.jit
def _divide_kernel(
    out_ptr, x_ptr, d_ptr, KEEP_NAN: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    offs = i * N + tl.arange(0, N)[None, :]
    x, d = tl.load(x_ptr + offs), tl.load(d_ptr + i)
    tl.store(out_ptr + offs, divide(x, d, 448.0, KEEP_NAN))


def hard_quotients(mantissas: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each divisor d in [1, 2) the numbers next to d times every midpoint of e4m3, and hence of
    e2m1: an odd number below 32 times a power of two. (n, 128) and (n,)."""
    d = (0x3F800000 + mantissas.int()).view(torch.float32)
    odd = torch.arange(1, 32, 2, device=d.device).float()
    nearest = (d[:, None] * odd).view(torch.int32)
    steps = torch.arange(-4, 4, device=d.device, dtype=torch.int32)
    return (nearest[..., None] + steps).view(torch.float32).flatten(1), d


def side(quotient: torch.Tensor) -> torch.Tensor:
    """-1, 0 or 1: below its midpoint, on it or above."""
    odd = torch.arange(1, 32, 2, device=quotient.device).float().repeat_interleave(8)
    return (quotient > odd).int() - (quotient < odd).int()


def test_quotients_next_to_every_midpoint(device):
    """A part of what the next test does on a GPU."""
    mantissas = torch.tensor([0, 1, 2, 3, 2**22, 2**23 - 1, 2**23 - 2, 1234567], device=device)
    x, d = hard_quotients(mantissas)
    got = torch.empty_like(x)
    _divide_kernel[(1,)](got, x, d, KEEP_NAN=True, N=128, BLOCK=8)
    assert torch.equal(side(got), side(x / d[:, None]))


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [0, -140, -126, -70, 70, 110])
def test_quotients_of_every_mantissa(exponent, device):
    """All 2^23 divisors: on the side of every midpoint where the rounded quotient is."""
    for start in range(0, 2**23, 2**20):
        x, d = hard_quotients(torch.arange(start, start + 2**20, device=device))
        x, d = x * 2.0**exponent, d * 2.0**exponent
        got = torch.empty_like(x)
        _divide_kernel[(2**20 // 64,)](got, x, d, KEEP_NAN=True, N=128, BLOCK=64)
        assert torch.equal(side(got), side(x / d[:, None]))


@pytest.mark.parametrize("keep_nan", [True, False])
def test_quotients_at_the_ends(keep_nan, device):
    """Divisors 0, subnormal, huge and infinite; nothing overflows on the way to the limit."""
    largest = torch.finfo(torch.float32).max
    d = [0.0, 2.0**-149, 2.0**-126, 1e-30, 1.0, 3.0, 1e30, largest, INF, NAN]
    x = [0.0, -0.0, 2.0**-149, 1e-38, -2e-30, 1.0, -447.0, 1e30, largest, -largest, INF, -INF, NAN]
    x, d = torch.tensor([x + [0.0] * 3] * len(d) + [[0.0] * 16] * 6), torch.tensor(d + [1.0] * 6)
    got = torch.empty(x.shape, device=device)
    _divide_kernel[(1,)](got, x.to(device), d.to(device), KEEP_NAN=keep_nan, N=16, BLOCK=16)
    got = got.cpu()
    quotient = x.abs() / torch.where(d == 0, 1.0, d)[:, None]
    want = quotient.clamp(max=448.0) if keep_nan else quotient.nan_to_num(448.0).clamp(max=448.0)
    number = ~d.isnan() if not keep_nan else d == d  # a NaN divisor: the callers see to it
    rounded, want = (v[number].to(torch.float8_e4m3fn) for v in (got, want))
    assert same_bits(rounded, want)
    if keep_nan:
        assert got[9].isnan().all()


@triton.jit
def _pack_kernel(out_ptr, codes_ptr, PER_WORD: tl.constexpr):
    offs = tl.arange(0, 8)[:, None] * 32 + tl.arange(0, 32)[None, :]
    words = pack(tl.load(codes_ptr + offs) + ROUND_BITS, PER_WORD)
    in_row: tl.constexpr = 32 // PER_WORD
    offs = tl.arange(0, 8)[:, None] * in_row + tl.arange(0, in_row)[None, :]
    tl.store(out_ptr + offs, words.to(out_ptr.dtype.element_ty))


@triton.jit
def _unpack_kernel(out_ptr, packed_ptr):
    offs = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    codes = unpack(tl.load(packed_ptr + offs))
    offs = tl.arange(0, 8)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + offs, codes)


@pytest.mark.parametrize("per_word, word", [(8, torch.int32), (2, torch.uint8)])
def test_packing(per_word, word, device):
    """QN17: element 0 is in the low half of byte 0."""
    codes = torch.randint(0, 16, (8, 32), dtype=torch.int32)
    codes[0, :2] = torch.tensor([1, 7])
    packed = torch.empty(8, 16, dtype=torch.uint8, device=device)
    _pack_kernel[(1,)](packed.view(word), codes.to(device), PER_WORD=per_word)
    assert packed[0, 0] == 0x71
    assert torch.equal(packed.cpu(), pack_ref(codes.byte()))
    back = torch.empty(8, 32, dtype=torch.int32, device=device)
    _unpack_kernel[(1,)](back, packed)
    assert torch.equal(back.cpu(), codes)
    assert decode_e2m1_ref(packed.cpu())[0, :2].tolist() == [0.5, 6.0]


@triton.jit
def _amax_kernel(out_ptr, x_ptr):
    offs = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out_ptr + tl.arange(0, 4), tl.reshape(amax(tl.load(x_ptr + offs), 1), (4,)))


def test_amax(device):
    x = torch.randn(4, 8)
    x[0] = -x[0].abs()
    x[1, 5], x[2, 3], x[2, 4] = NAN, INF, NAN
    x[3] = -0.0
    out = torch.empty(4, device=device)
    _amax_kernel[(1,)](out, x.to(device))
    assert same_bits(out, x.abs().amax(1))
