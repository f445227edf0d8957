"""NVFP4 against its reference, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.quantize_inputs import (
    DTYPES,
    E2M1,
    assert_same,
    in_rows,
    midpoints,
    not_numbers,
    numbers,
    on_cpu,
    same_bits,
)
from tests.kernels.test_quantize_fp8 import SWIGLU, activated
from tests.layouts import STRIDED
from tmoe.kernels.quantize_nvfp4 import (
    dequantize_nvfp4,
    dequantize_nvfp4_ref,
    quantize_nvfp4,
    quantize_nvfp4_ref,
)
from tmoe.kernels.quantize_ref import Rows

NAN, INF = math.nan, math.inf


def check(x: Tensor, **how) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's codes and scales, which are the reference's."""
    got = quantize_nvfp4(x, **how)
    assert_same(got, quantize_nvfp4_ref(x.cpu(), **on_cpu(how)))
    return got


def values_of(parts: tuple[Tensor, Tensor, Tensor], **how) -> Tensor:
    return dequantize_nvfp4(*parts, dtype=torch.float32, **how)


@pytest.mark.parametrize("name", [*numbers(), *not_numbers()])
def test_hard_numbers(name, device):
    """With the global scale of the data, and with given ones, far too small and too large too."""
    x = {**numbers(), **not_numbers()}[name].to(device)
    check(x)
    for g in (1.0, 1e-3, 3e-7, 2.0**-149, 1e-42, 1e30, 1e36):
        check(x, global_scale=torch.tensor(g, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, device):
    x = (torch.randn(2, 5, 96, device=device) * 3).to(dtype)
    assert_same(check(x), check(x.float()))


def test_ties_and_their_neighbours(device):
    """Every midpoint of e2m1 under the scale 1."""
    x = in_rows(midpoints(E2M1), 96, every=16, largest=6.0).to(device)
    data, scale, _ = check(x, global_scale=torch.tensor(1.0, device=device))
    assert (scale.float()[(x.view(-1, 6, 16) != 0).any(-1)] == 1).all()


def test_ties_of_the_scales(device):
    """Block maxima at every midpoint of e4m3, subnormals included, and beyond both ends."""
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    maxima = torch.cat((midpoints(e4m3), torch.tensor([1e-3, 1e-6, 460.0, 1e6]))) * 6
    x = torch.zeros(len(maxima), 16)
    x[:, 3], x[:, 8] = maxima, maxima / 3
    check(x.view(-1, 80).to(device), global_scale=torch.tensor(1.0, device=device))


def test_the_example_of_the_kernel_file(device):
    x = torch.zeros(1, 16, device=device)
    x[0, :2] = torch.tensor([11.0, -3.0])
    parts = check(x, global_scale=torch.tensor(1.0, device=device))
    assert parts[1].float() == 1.875
    assert values_of(parts)[0, :2].tolist() == [11.25, -2.8125]
    assert parts[0][0, 0] == 0xB7  # 6 in the low half (QN17), -1.5 in the high half


@pytest.mark.parametrize("K", [2, 16, 32, 48, 96, 130, 1036, 2060])
def test_row_lengths(K, device):
    for M in (1, 3):
        data, scale, g = check(torch.randn(M, K, device=device))
        assert data.shape == (M, K // 2) and scale.shape == (M, -(-K // 16)) and g.shape == ()


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (2, 0, 32), (0, 4, 32)], ids=str)
def test_nothing_to_do(shape, device):
    parts = check(torch.randn(shape, device=device))
    assert values_of(parts).shape == shape


@pytest.mark.parametrize("layout", STRIDED.values(), ids=STRIDED.keys())
def test_strided_memory(layout, device):
    x = torch.randn(3, 6, 96, device=device)
    want = check(x)
    assert_same(check(layout(x)), want)
    check(torch.randn(6, 192, device=device)[:, ::2])
    data, scale, g = (part.transpose(-1, -2) if part.dim() > 1 else part for part in want)
    data, scale = (part.contiguous().transpose(-1, -2) for part in (data, scale))
    assert torch.equal(values_of((data, scale, g)), values_of(want))
    assert torch.equal(values_of((data[1], scale[1], g[1])), values_of(want)[1])


def test_leading_dimensions(device):
    x = (
        torch.randn(2, 3, 4, 64, device=device)
        * torch.tensor([1.0, 10.0, 0.1], device=device)[:, None, None]
    )
    data, scale, g = check(x)
    assert g.shape == (2, 3)
    want = x.abs().amax((-2, -1)).cpu() / torch.full((2, 3), 2688.0)
    assert torch.equal(g.cpu(), want)
    assert torch.equal(
        values_of((data, scale, g))[1, 2], values_of((data[1, 2], scale[1, 2], g[1, 2]))
    )


def test_zeros(device):
    """QN01, QN02: no NaN out of a matrix, an expert or a block of zeros; -0 stays."""
    x = torch.randn(2, 4, 32, device=device)
    x[0], x[1, 2, :16] = 0.0, 0.0
    x[0, :, ::2] = -0.0
    data, scale, g = check(x)
    assert g[0] == 1 and (scale[0].float() == 0).all() and scale[1, 2, 0].float() == 0
    values = values_of((data, scale, g))
    assert same_bits(values[0], x[0]) and (values[1, 2, :16] == 0).all()


def test_nothing_vanishes(device):
    """QN12, QN13"""
    for factor in (1e-30, 1e-4, 1.0, 1e30):
        x = torch.randn(8, 96, device=device) * factor
        ratio = (values_of(check(x)) / factor).norm() / (x / factor).norm()
        assert 0.9 < ratio < 1.1


def test_not_a_number(device):
    """A NaN under a given global scale stays with its block; an infinity saturates."""
    x = torch.ones(3, 32, device=device)
    x[0, 5], x[1, 20] = NAN, -INF
    parts = check(x, global_scale=torch.tensor(1.0, device=device))
    values = values_of(parts)
    assert values[0, :16].isnan().all() and parts[1][0, 0].view(torch.uint8) == 0x7F
    assert values[1, 20] == -2688 and values[0, 16:].isfinite().all() and values[2].isfinite().all()
    assert values_of(check(x)).isnan().all()  # the maximum of all is NaN
    assert values_of(check(x[1:]))[0].isnan().any()


@pytest.mark.parametrize("name", numbers())
def test_round_trip(name, device):
    """Values don't change when they are quantised again with the same global scale."""
    parts = quantize_nvfp4(numbers()[name].to(device))
    values = values_of(parts)
    if parts[2] >= 2.0**-120:  # else scale · global scale is too coarse a number to divide by
        again = quantize_nvfp4(values, global_scale=parts[2])
        assert same_bits(values_of(again), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize(dtype, device):
    """All codes under all 256 scales."""
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8).expand(8, 256).contiguous()
    scale = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(8, 32)
    scale = scale.view(torch.float8_e4m3fn)
    for g in (torch.tensor(1.0), torch.tensor(0.37), torch.tensor(1e-38)):
        got = dequantize_nvfp4(data.to(device), scale.to(device), g.to(device), dtype=dtype)
        assert same_bits(got, dequantize_nvfp4_ref(data, scale, g, dtype=dtype))
    without = dequantize_nvfp4(data.to(device), scale.to(device), None, dtype=dtype)
    assert same_bits(without, dequantize_nvfp4_ref(data, scale, torch.tensor(1.0), dtype=dtype))


def test_halves_of_the_rows(device):
    """Gate and up have global scales of their own: (E, 2)."""
    x = torch.randn(3, 10, 48, device=device)
    x[:, 5:] *= 50
    g = torch.stack((x[:, :5].abs().amax((1, 2)), x[:, 5:].abs().amax((1, 2))), dim=1) / 2688
    data, scale, _ = check(x, global_scale=g)
    up = quantize_nvfp4(x[:, 5:], global_scale=g[:, 1])
    assert torch.equal(data[:, 5:], up[0])
    values = values_of((data, scale, g))
    assert torch.equal(values[:, 5:], values_of(up))
    assert same_bits(
        values, dequantize_nvfp4_ref(data.cpu(), scale.cpu(), g.cpu(), dtype=torch.float32)
    )
    check(x[0], global_scale=g[0])


@pytest.mark.parametrize("offsets", [[0, 3, 3, 7, 9], [0, 0, 0, 0, 9], [0, 2, 4, 6, 7]], ids=str)
def test_rows_of_experts(offsets, device):
    """Each row has its expert's global scale; rows past the last offset may hold anything."""
    x = torch.randn(9, 96, device=device)
    g = torch.tensor([1e-3, 1e-1, 1.0, 3e-2], device=device)
    expert_offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
    how = dict(expert_offsets=expert_offsets)
    parts = check(x, global_scale=g, **how)
    values = values_of(parts, **how)
    for e, (first, last) in enumerate(zip(offsets, offsets[1:], strict=False)):
        alone = quantize_nvfp4(x[first:last], global_scale=g[e])
        assert torch.equal(parts[0][first:last], alone[0])
        assert torch.equal(values[first:last], values_of(alone))
    cpu = [part.cpu() for part in parts]
    want = dequantize_nvfp4_ref(*cpu, expert_offsets=expert_offsets.cpu(), dtype=torch.float32)
    assert same_bits(values, want)


def test_many_experts(device):
    """More experts than rows, more rows than a tile has."""
    counts = torch.randint(0, 3, (70,))
    offsets = torch.cat((torch.zeros(1), counts.cumsum(0))).int().to(device)
    x = torch.randn(int(offsets[-1]), 64, device=device)
    check(x, global_scale=torch.rand(70, device=device), expert_offsets=offsets)


def test_gathered_rows(device):
    """Gather, per-expert global scales and the activation in one launch."""
    x = torch.randn(5, 96, device=device)
    row_index = torch.tensor([4, 0, 0, -1, 3, 5], dtype=torch.int32, device=device)
    picked = x[row_index.clamp(0, 4).long()]
    picked[[3, 5]] = 0
    assert_same(check(x, rows=Rows(row_index)), check(picked))
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    how = dict(global_scale=torch.tensor([1e-3, 1e-2], device=device), expert_offsets=offsets)
    assert_same(check(x, rows=Rows(row_index), **how), check(picked, **how))
    got = quantize_nvfp4(x, rows=Rows(row_index), activation=SWIGLU, **how)
    assert_same(got, check(activated(picked, SWIGLU), **how))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation(dtype, device):
    x = torch.randn(4, 192, device=device).to(dtype)
    for activation in (SWIGLU, ("swiglu_oai", 1.702, 7.0)):
        got = quantize_nvfp4(x, activation=activation)
        assert_same(got, check(activated(x, activation)))
