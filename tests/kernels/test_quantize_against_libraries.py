"""The same codes and scales as other libraries, bit for bit, on fp32 copies of the data.

Where a library is known to differ, the test says in what, and that all else is the same.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.quantize_inputs import (
    DTYPES,
    E2M1,
    E4M3,
    assert_same,
    in_rows,
    midpoints,
    numbers,
    same_bits,
)
from tests.kernels.quantize_libraries import CompressedTensors, ModelOpt, TorchAO
from tmoe.kernels.quantize_fp8 import quantize_fp8
from tmoe.kernels.quantize_mx import quantize_mx
from tmoe.kernels.quantize_nvfp4 import quantize_nvfp4
from tmoe.kernels.quantize_ref import decode_e2m1_ref, decode_ue8m0_ref

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
LIBRARIES = [CompressedTensors, TorchAO, ModelOpt]
every_library = pytest.mark.parametrize("library", LIBRARIES, ids=lambda c: c.__name__)
every_block = pytest.mark.parametrize("block", ["tensor", "row", (1, 128), (128, 128)], ids=str)


def data(M: int = 128, K: int = 256) -> dict[str, Tensor]:
    """(M, K) without a block of zeros; fp32, and values that bf16 and fp16 hold."""
    x = torch.randn(M, K)
    outliers = x.clone()
    outliers[torch.rand(M, K) < 0.02] *= 1e4
    wide = x * torch.exp(3 * torch.randn(M, K))
    small = x * 1e-30
    cases = {"random": x, "outliers": outliers, "wide": wide, "1e-30": small, "1e30": x * 1e30}
    return cases | {f"random {d}": x.to(d).float() for d in DTYPES[1:]}


@every_library
@every_block
@pytest.mark.parametrize("name", data(1, 1))
def test_fp8(name, block, library, device):
    x = data()[name]
    got = quantize_fp8(x.to(device), block=block)
    assert_same(got, library.fp8(x, block))


@every_library
def test_fp8_ties_and_exponents(library, device):
    """All 256 bytes, all midpoints with their neighbours, and every exponent that leaves a scale
    which is no subnormal. (compressed-tensors adds a zero point of 0, which makes -0 a 0.)"""
    x = in_rows(midpoints(E4M3), 128, every=128, largest=448.0)
    codes = in_rows(torch.cat((E4M3, -E4M3[1:])), 128, every=128, largest=448.0)
    powers = torch.ldexp(torch.ones(240, 1), torch.arange(-112, 128)[:, None])
    for rows in (x, codes, powers * torch.rand(240, 128).clamp(min=0.01)):
        assert_same(quantize_fp8(rows.to(device), block="row"), library.fp8(rows, "row"))


TORCHAO_RULES = [  # without its even for e4m3, which rounds the maximum to three places
    ("e4m3", "floor"), ("e4m3", "ceil"), ("e2m1", "floor"), ("e2m1", "even"), ("e2m1", "ceil"),
]  # fmt: skip


@pytest.mark.parametrize("element, rule", TORCHAO_RULES)
@pytest.mark.parametrize("name", data(1, 1))
def test_mx_torchao(name, element, rule, device):
    x = data()[name]
    got = quantize_mx(x.to(device), element=element, scale_rule=rule)
    assert_same(got, TorchAO.mx(x, element, rule))


@pytest.mark.parametrize("element, rule", TORCHAO_RULES)
def test_mx_torchao_ties(element, rule, device):
    values = {"e4m3": E4M3, "e2m1": E2M1}[element]
    x = in_rows(midpoints(values), 96, every=32, largest=float(values[-1]))
    got = quantize_mx(x.to(device), element=element, scale_rule=rule)
    assert_same(got, TorchAO.mx(x, element, rule))


def test_mx_torchao_not_a_number(device):
    """Its ceil has 255 for a NaN and 254 for an infinity too."""
    x = torch.ones(2, 64)
    x[0, 3], x[1, 40] = math.nan, math.inf
    _, scale = quantize_mx(x.to(device), element="e4m3", scale_rule="ceil")
    assert_same((scale,), TorchAO.mx(x, "e4m3", "ceil")[1:])


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
@pytest.mark.parametrize("name", data(1, 1))
def test_mx_compressed_tensors(name, element, device):
    """Even. It has no -0 in e2m1: a negative value that rounds to 0 keeps no sign."""
    x = data()[name]
    codes, scale = quantize_mx(x.to(device), element=element, scale_rule="even")
    want_codes, want_scale = CompressedTensors.mx(x, element)
    assert_same((scale,), (want_scale,))
    if element == "e4m3":
        assert_same((codes,), (want_codes,))
    else:
        assert torch.equal(decode_e2m1_ref(codes.cpu()), decode_e2m1_ref(want_codes))  # -0 == 0


@pytest.mark.parametrize("name", data(1, 1))
def test_mxfp8_modelopt(name, device):
    x = data()[name]
    got = quantize_mx(x.to(device), element="e4m3", scale_rule="ceil")
    assert_same(got, ModelOpt.mx(x, "e4m3"))


@pytest.mark.parametrize("name", data(1, 1))
def test_mxfp4_modelopt(name, device):
    """Ceil. It rounds ties towards zero, and +0 is its code 8."""
    x = data()[name]
    codes, scale = quantize_mx(x.to(device), element="e2m1", scale_rule="ceil")
    want_codes, want_scale = ModelOpt.mx(x, "e2m1")
    assert_same((scale,), (want_scale,))
    values, want = decode_e2m1_ref(codes.cpu()), decode_e2m1_ref(want_codes)
    quotient = x / decode_ue8m0_ref(scale.cpu()).repeat_interleave(32, dim=-1)
    ties = torch.isin(quotient.abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    assert torch.equal(values[~ties], want[~ties])
    assert (want[ties].abs() <= quotient[ties].abs()).all()


@pytest.mark.parametrize("name", data(1, 1))
def test_nvfp4_modelopt(name, device):
    """The order of operations is ModelOpt's, for any global scale. It keeps no sign of -0."""
    x = data()[name]
    for g in (x.abs().max() / 2688, torch.tensor(0.37) * x.abs().max() / 2688):
        codes, scale, _ = quantize_nvfp4(x.to(device), global_scale=g.to(device))
        assert_same((codes, scale), ModelOpt.nvfp4(x, g))


@pytest.mark.parametrize("name", data(1, 1))
def test_nvfp4_power_of_two(name, device):
    """With a power of two as global scale compressed-tensors agrees in all values as well. It has
    no -0, and the scale .125 where ours is the least one and its own would be 0."""
    x = data()[name]
    g = torch.exp2(torch.floor(torch.log2(x.abs().max() / 2688)))
    codes, scale, _ = quantize_nvfp4(x.to(device), global_scale=g.to(device))
    want_codes, want_scale = CompressedTensors.nvfp4(x, g)
    scale = scale.cpu().float()
    differ = scale != want_scale.float()
    assert (scale[differ] == 2.0**-9).all() and (want_scale.float()[differ] == 0.125).all()
    same = ~differ.repeat_interleave(16, dim=-1)
    values, want = decode_e2m1_ref(codes.cpu()), decode_e2m1_ref(want_codes)
    assert torch.equal(values[same], want[same])


@pytest.mark.parametrize("name", ["random", "random torch.bfloat16", "1e30"])
def test_nvfp4_torchao(name, device):
    """It multiplies by a reciprocal, so codes next to a tie may be one step off, and its scales are
    worked out in another order: in less than one of a thousand."""
    x = data()[name]
    codes, scale, g = quantize_nvfp4(x.to(device))
    want_codes, want_scale = TorchAO.nvfp4(x, g.cpu())
    differ = scale.cpu().float() != want_scale.float()
    assert differ.float().mean() < 1e-3
    same = ~differ.repeat_interleave(16, dim=-1)
    values, want = decode_e2m1_ref(codes.cpu())[same], decode_e2m1_ref(want_codes)[same]
    assert (values != want).float().mean() < 1e-3
    order = torch.cat((-E2M1.flip(0)[:-1], E2M1))
    steps = torch.searchsorted(order, values) - torch.searchsorted(order, want)
    assert steps.abs().max() <= 1


@pytest.mark.parametrize("name", numbers())
def test_fp8_of_hard_numbers(name, device):
    """Wherever no row is zero and no scale subnormal, torchao agrees on the hard numbers too."""
    x = numbers(128)[name]
    scale = x.abs().amax(-1) / 448
    x = x[scale >= 2.0**-126]
    if len(x):
        got = quantize_fp8(x.to(device), block="row")
        want = TorchAO.fp8(x, "row")
        assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])
