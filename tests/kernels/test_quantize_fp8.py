"""FP8 against its reference, bit for bit; the reference against torch by hand."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.quantize_inputs import (
    DTYPES,
    E4M3,
    assert_same,
    in_rows,
    midpoints,
    not_numbers,
    numbers,
    on_cpu,
    same_bits,
)
from tests.layouts import STRIDED
from tmoe.kernels.activation import activate, activate_gated
from tmoe.kernels.quantize_fp8 import (
    dequantize_fp8,
    dequantize_fp8_ref,
    quantize_fp8,
    quantize_fp8_ref,
)
from tmoe.kernels.quantize_ref import Rows

BLOCKS = ["tensor", "row", (1, 128), (128, 128)]
NAN, INF = math.nan, math.inf
SWIGLU = ("swiglu", 1.0, INF)


def check(x: Tensor, **how) -> tuple[Tensor, Tensor]:
    """The kernel's codes and scales, which are the reference's."""
    got = quantize_fp8(x, **how)
    assert_same(got, quantize_fp8_ref(x.cpu(), **on_cpu(how)))
    return got


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", [*numbers(), *not_numbers()])
def test_hard_numbers(name, block, device):
    x = {**numbers(160), **not_numbers(160)}[name].to(device)
    check(x, block=block)
    if isinstance(block, tuple):
        check(x, block=block, power_of_two=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_dtype(block, dtype, device):
    x = (torch.randn(2, 5, 200, device=device) * 3).to(dtype)
    got = check(x, block=block)
    assert_same(got, quantize_fp8_ref(x.float().cpu(), block=block))  # computed in fp32


def test_ties_and_their_neighbours(device):
    """Every midpoint of e4m3 under the scale 1."""
    x = in_rows(midpoints(E4M3), 128, every=128, largest=448.0).to(device)
    data, scale = check(x, block="row")
    assert (scale == 1).all()
    assert same_bits(data, x.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("K", [1, 16, 33, 48, 96, 130, 300])
def test_row_lengths(K, block, device):
    for M in (1, 3):
        check(torch.randn(M, K, device=device), block=block)


def test_blocks_of_a_column(device):
    """Partial last blocks in both directions, and scales of each expert."""
    x = torch.randn(2, 130, 140, device=device)
    x[1] *= 100
    data, scale = check(x, block=(128, 128))
    assert data.shape == (2, 130, 140) and scale.shape == (2, 2, 2)
    assert (scale[0] < scale[1]).all()


def test_leading_dimensions(device):
    x = torch.randn(2, 3, 4, 40, device=device)
    for block, shape in zip(BLOCKS, [(2, 3), (2, 3, 4), (2, 3, 4, 1), (2, 3, 1, 1)], strict=True):
        data, scale = check(x, block=block)
        assert data.shape == x.shape and scale.shape == shape
    assert check(torch.randn(3, 40, device=device), block="tensor")[1].shape == ()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (2, 0, 32), (0, 4, 32)], ids=str)
def test_nothing_to_do(shape, block, device):
    x = torch.randn(shape, device=device)
    data, scale = check(x, block=block)
    assert dequantize_fp8(data, scale, block=block, dtype=torch.bfloat16).shape == shape


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("layout", STRIDED.values(), ids=STRIDED.keys())
def test_strided_memory(layout, block, device):
    x = torch.randn(3, 6, 160, device=device)
    want = check(x, block=block)
    assert_same(check(layout(x), block=block), want)
    every_second = torch.randn(6, 320, device=device)[:, ::2]
    check(every_second, block=block)
    data, scale = want
    values = dequantize_fp8(data, scale, block=block, dtype=torch.float32)
    strided = layout(scale) if scale.dim() == 3 else scale
    got = dequantize_fp8(_layout_of_codes(layout, data), strided, block=block, dtype=torch.float32)
    assert torch.equal(got, values)


def _layout_of_codes(layout, data: Tensor) -> Tensor:
    return layout(data.float()).to(torch.float8_e4m3fn)


def test_long_rows(device):
    """More than a program keeps in registers: two passes, the maximum in the last."""
    x = torch.randn(2, 16500, device=device)
    x[0, -1] = -1000.0
    data, scale = check(x, block="row")
    assert scale[0] == torch.tensor(1000.0) / torch.tensor(448.0)
    x[1, 16490] = NAN
    data, scale = check(x, block="row")
    assert data[1].float().isnan().all() and not data[0].float().isnan().any()


def test_not_a_number(device):
    """A NaN makes its block NaN and no other one; an infinity is NaN beside zeros."""
    x = torch.ones(3, 256, device=device)
    x[0, 5], x[1, 200] = NAN, INF
    data, scale = check(x, block=(1, 128))
    values = data.float().cpu()
    assert values[0, :128].isnan().all() and (values[0, 128:] == 448).all()
    assert values[1, 200].isnan() and values[1, 128:].nansum() == 0
    assert scale[1, 1].isinf() and (values[2] == 448).all()
    data, scale = check(x, block=(1, 128), power_of_two=True)
    assert data[1, 200].float() == 448 and scale[1, 1] == 2.0**127


def test_zeros(device):
    """QN01: the scale 1, not 0; -0 stays."""
    x = torch.zeros(2, 128, device=device)
    x[1, ::2] = -0.0
    for block in BLOCKS:
        for power_of_two in (False, True):
            data, scale = check(x, block=block, power_of_two=power_of_two)
            assert (scale == 1).all() and same_bits(data.float(), x)


def test_power_of_two_comes_before_the_codes(device):
    """QN07: 3.0 comes back; made in the other order it would be 3.5."""
    x = torch.full((1, 128), 3.0, device=device)
    data, scale = check(x, block=(1, 128), power_of_two=True)
    assert scale == 2.0**-7
    assert (dequantize_fp8(data, scale, block=(1, 128), dtype=torch.float32) == 3).all()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_given_scale(block, device):
    """Static scales: beyond 448 · scale saturates, infinities too; a scale of 0 is harmless."""
    x = torch.randn(3, 6, 160, device=device) * 3
    x[0, 0, :4] = torch.tensor([INF, -INF, 1e30, -1e30])
    shape = quantize_fp8(x, block=block)[1].shape
    scale = torch.rand(shape, device=device) / 100
    data, returned = check(x, block=block, scale=scale)
    assert torch.equal(returned, scale)
    assert data[0, 0, :4].float().tolist() == [448, -448, 448, -448]
    one = torch.tensor(0.01, device=device)
    assert_same(
        check(x, block=block, scale=one)[:1], check(x, block=block, scale=one.expand(shape))[:1]
    )
    for extreme in (0.0, 1e-40, 1.2e-38, 1e38):  # QN03
        scale[0] = extreme
        assert not check(x, block=block, scale=scale)[0].float().isnan().any()


def test_one_scale_per_expert(device):
    """QN21"""
    x = torch.full((3, 2, 16), 4.0, device=device)
    data, _ = check(x, block="tensor", scale=torch.tensor([1.0, 0.1, 10.0], device=device))
    assert data[:, 0, 0].float().tolist() == [4.0, 40.0, 0.40625]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", numbers())
def test_round_trip(name, block, device):
    """Codes don't change when their values are quantised again with the same scale."""
    x = numbers(160)[name].to(device)
    data, scale = quantize_fp8(x, block=block)
    values = dequantize_fp8(data, scale, block=block, dtype=torch.float32)
    if name != "largest":  # 448 · (largest / 448) is infinite
        again, _ = quantize_fp8(values, block=block, scale=scale)
        subnormal = (scale < 2.0**-126).any()  # such scales are too coarse to keep codes apart
        assert subnormal or torch.equal(again.float(), data.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_dequantize(block, dtype, device):
    """All 256 bytes, under every kind of scale."""
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    data = data.view(1, 1, 256).expand(2, 3, 256).contiguous()
    shape = quantize_fp8_ref(data.float(), block=block)[1].shape
    for scale in (torch.rand(shape), torch.rand(shape).bfloat16(), torch.tensor(0.3)):
        got = dequantize_fp8(data.to(device), scale.to(device), block=block, dtype=dtype)
        assert same_bits(got, dequantize_fp8_ref(data, scale, block=block, dtype=dtype))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_gathered_rows(block, device):
    """Numbers outside x are rows of zeros: a table's tail that nobody wrote is harmless."""
    x = torch.randn(5, 160, device=device)
    row_index = torch.tensor([4, 0, 0, -1, 3, 5, -(2**30)], dtype=torch.int32, device=device)
    got = check(x, block=block, rows=Rows(row_index))
    picked = x[row_index.clamp(0, 4).long()]
    picked[[3, 5, 6]] = 0
    assert_same(got, quantize_fp8(picked, block=block))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_rows_in_expert_order(block, weighted, device):
    """Slots stand for tokens, perhaps weighted; what stands behind the last row counts for
    nothing, though it be NaN."""
    x = torch.randn(5, 160, device=device).bfloat16()
    slots = torch.tensor([9, 0, 4, 7, -(2**30), 3], dtype=torch.int32, device=device)
    weight = torch.rand(5, 2, device=device) if weighted else None
    count = torch.tensor([4], dtype=torch.int32, device=device)
    got = check(x, block=block, rows=Rows(slots, 2, weight, count))
    picked = x.float()[[4, 0, 2, 3, 0, 0]]
    if weight is not None:
        picked[:4] *= weight.flatten()[[9, 0, 4, 7]][:, None]
    picked[4:] = 0
    assert_same(got, quantize_fp8(picked, block=block))
    x[3:] = math.nan
    got = check(x, block=block, rows=Rows(count=count - 1))
    assert_same(got, quantize_fp8(torch.where(x.isnan(), 0, x), block=block))


@pytest.mark.parametrize("columns", [64, 128, 200])
@pytest.mark.parametrize("scales_by_column", [False, True])
def test_copies(scales_by_column, columns, device):
    """A token's codes and scales in every row that is its own, and no other row written."""
    x = torch.randn(5, columns, device=device).bfloat16()
    codes, scale = quantize_fp8(x, block=(1, 128))
    copies = torch.tensor([[9, 0], [4, -1], [7, 1], [-1, -1], [3, 8]], dtype=torch.int32)
    got_codes, got_scale = quantize_fp8(
        x, block=(1, 128), copies=copies.to(device), scales_by_column=scales_by_column
    )
    assert got_codes.shape == (10, columns) and got_scale.shape == (10, scale.shape[1])
    for token, rows in enumerate(copies.tolist()):
        for row in rows:
            if row >= 0:
                assert_same((got_codes[row], got_scale[row]), (codes[token], scale[token]))


def test_rows_of_no_copy_stay_as_they_are(device, monkeypatch):
    poison, empty = {torch.uint8: 0x55, torch.float32: NAN}, Tensor.new_empty

    def poisoned(x, *size, **keywords):
        new = empty(x, *size, **keywords)
        return new.fill_(poison.get(new.dtype, 0))

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    copies = torch.tensor([[2, -1], [-1, 0]], dtype=torch.int32, device=device)
    codes, scale = quantize_fp8(torch.ones(2, 128, device=device), block=(1, 128), copies=copies)
    assert (codes.view(torch.uint8)[[1, 3]] == 0x55).all() and scale[[1, 3]].isnan().all()


@triton.jit
def _activate_kernel(out_ptr, x_ptr, K, alpha, limit, NAME: tl.constexpr, GATED: tl.constexpr):
    offs = tl.arange(0, 256)
    mask = offs < K
    if GATED:
        row = x_ptr + tl.program_id(0) * 2 * K
        gate = tl.load(row + offs, mask=mask, other=0.0)
        up = tl.load(row + K + offs, mask=mask, other=0.0)
        y = activate_gated(gate, up, alpha, limit, NAME)
    else:
        y = activate(tl.load(x_ptr + tl.program_id(0) * K + offs, mask=mask, other=0.0), NAME)
    tl.store(out_ptr + tl.program_id(0) * K + offs, y, mask=mask)


def activated(x: Tensor, activation: tuple[str, float, float], gated: bool = True) -> Tensor:
    """The activation in fp32, by the same device functions."""
    name, alpha, limit = activation
    M, K = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = torch.empty(M, K, device=x.device)
    _activate_kernel[(M,)](out, x.float(), K, alpha, limit, NAME=name, GATED=gated)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_activation(block, dtype, device):
    """act(gate, up) is quantised in fp32, not rounded to the input's dtype before."""
    x = torch.randn(4, 320, device=device).to(dtype)
    for activation in (SWIGLU, ("swiglu_oai", 1.702, 7.0)):
        got = quantize_fp8(x, block=block, activation=activation)
        assert_same(got, quantize_fp8(activated(x, activation), block=block))
        values = dequantize_fp8(*got, block=block, dtype=torch.float32)
        data, scale = quantize_fp8_ref(x, block=block, activation=activation)
        want = dequantize_fp8_ref(data, scale, block=block, dtype=torch.float32)
        torch.testing.assert_close(values, want, rtol=2**-3, atol=float(scale.max()) / 8)


def test_ungated_activation(device):
    x = torch.randn(4, 96, device=device)
    got = quantize_fp8(x, block="row", activation=("relu2", 1.0, INF))
    want = activated(x, ("relu2", 1.0, INF), gated=False)
    assert_same(got, quantize_fp8(want, block="row"))


def test_input_is_not_modified(device):
    x = torch.randn(4, 96, device=device)
    before = x.clone()
    for block in BLOCKS:
        quantize_fp8(x, block=block)
    assert torch.equal(x, before)
