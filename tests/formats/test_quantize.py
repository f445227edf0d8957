"""`tmoe.quantize` as a caller sees it: every format, the edges, faults that others met.

The bits of the codes are the subject of the kernels' own tests.
"""

from __future__ import annotations

import math

import pytest
import torch

from tmoe import quantize
from tmoe.formats import FORMATS, QuantizedTensor, decode_e8m0

VARIANTS = [
    *((name, {}) for name in FORMATS),
    ("fp8_block", {"block_shape": (128, 128)}),
    ("fp8_block", {"scale_rule": "ceil"}),
    ("mxfp8", {"scale_rule": "floor"}),
    ("mxfp8", {"scale_rule": "even"}),
    ("mxfp4", {"scale_rule": "floor"}),
    ("mxfp4", {"scale_rule": "ceil"}),
]
variants = pytest.mark.parametrize(
    "format, options", VARIANTS, ids=lambda v: v if isinstance(v, str) else str(list(v.values()))
)
FP8 = [variant for variant in VARIANTS if variant[0].startswith("fp8")]
FP4 = [name for name, format in FORMATS.items() if format.is_packed]


def all_equal(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@variants
@pytest.mark.parametrize(
    "shape", [(64,), (5, 130), (3, 130, 34), (2, 3, 4, 32), (0, 64), (3, 0, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_dtypes(format, options, shape, dtype):
    """SH14, SH15: partial blocks, rows that are no multiple of anything."""
    x = torch.randn(shape, dtype=dtype)
    before = x.clone()
    q = quantize(x, format, **options)
    spec = FORMATS[format]
    assert isinstance(q, QuantizedTensor) and q.shape == x.shape and q.dtype == dtype
    assert tuple(q.data.shape) == spec.data_shape(shape)
    assert tuple(q.scale.shape) == spec.scale_shape(shape, q.block_shape)
    assert q.data.dtype == spec.element.storage and q.scale.dtype == spec.scale.storage
    if spec.has_global_scale:
        assert tuple(q.global_scale.shape) == shape[:-2] and q.global_scale.dtype == torch.float32
    assert torch.equal(x, before)
    all_equal(quantize(x.float(), format, **options).dequantize(), q.dequantize())


@variants
def test_the_values_survive(format, options):
    """QN12: a quantiser that rounds all to 0 would pass a comparison of products."""
    x = torch.randn(2, 130, 256)
    y = quantize(x, format, **options).dequantize()
    assert 0.95 < y.norm() / x.norm() < 1.05
    assert (y - x).norm() / x.norm() < (0.15 if format in FP4 else 0.04)


@variants
def test_strided_input(format, options):
    x = torch.randn(64, 3, 10).permute(1, 2, 0)
    assert not x.is_contiguous()
    all_equal(
        quantize(x, format, **options).dequantize(),
        quantize(x.contiguous(), format, **options).dequantize(),
    )


@variants
def test_values_do_not_change_when_quantised_again(format, options):
    q = quantize(torch.randn(3, 8, 256), format, **options)
    again = quantize(q.dequantize(), format, **options)
    assert torch.equal(again.dequantize(), q.dequantize())


@variants
def test_each_expert_is_quantised_by_itself(format, options):
    x = torch.randn(3, 8, 64) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    q = quantize(x, format, **options)
    for e in range(3):
        assert torch.equal(q[e], quantize(x[e], format, **options))


@variants
@pytest.mark.parametrize("tiny", [0.0, 1e-30])
def test_zeros_stay_zeros(format, options, tiny):
    """QN01, QN02: an all-zero block, row, tile and tensor; and one of nearly nothing."""
    x = torch.randn(256, 256)
    x[0, :128] = tiny
    x[128:, 128:] = tiny
    for tensor in (x, torch.full((4, 32), tiny)):
        q = quantize(tensor, format, **options)
        y = q.dequantize()
        assert y.isfinite().all() and q.scale.float().isfinite().all()
        assert ((y == 0) | (tensor != 0)).all()
        assert (y[tensor.abs() <= tiny].abs() <= 2 * tiny).all()
        if q.global_scale is not None:
            assert q.global_scale.isfinite().all() and (q.global_scale > 0).all()


def test_an_all_zero_tensor_has_global_scale_1():
    q = quantize(torch.zeros(4, 32), "nvfp4")
    assert q.global_scale == 1 and (q.scale.view(torch.uint8) == 0).all() and (q.data == 0).all()


@variants
def test_minus_zero_keeps_its_sign(format, options):
    y = quantize(torch.tensor([[-0.0, 0.0, 1.0, -1.0] * 8]), format, **options).dequantize()
    assert y.signbit().tolist() == [[True, False, False, True] * 8]


def _block_of(x, format, options):
    """Where the values stand that share a scale with x[3, 5]: all of it under a global scale."""
    rows, columns = FORMATS[format].check_block_shape(options.get("block_shape"), "test")
    block = torch.zeros(x.shape, dtype=torch.bool)
    if rows is None or (format == "nvfp4" and "global_scale" not in options):
        return block.fill_(True)
    top = 3 // rows * rows
    block[top : top + rows, :columns] = True
    return block


EDGES = [*VARIANTS, ("nvfp4", {"global_scale": 2.0**-6})]


@pytest.mark.parametrize("format, options", EDGES)
def test_nan_is_never_lost(format, options):
    x = torch.randn(256, 256)
    x[3, 5] = math.nan
    y = quantize(x, format, **options).dequantize()
    assert torch.equal(y.isnan(), _block_of(x, format, options))


@pytest.mark.parametrize("format, options", EDGES)
@pytest.mark.parametrize("inf", [math.inf, -math.inf])
def test_what_becomes_of_infinity(format, options, inf):
    """Two rules: where the scale is a power of two it is still infinite, else its block is NaN."""
    x = torch.randn(256, 256)
    x[3, 5] = inf
    y = quantize(x, format, **options).dequantize()
    block = _block_of(x, format, options)
    assert y[~block].isfinite().all()
    if options == {"global_scale": 2.0**-6}:
        assert y[3, 5] == math.copysign(6 * 448 / 64, inf)
        assert y.isfinite().all()
    elif format.startswith("mx") or "scale_rule" in options:
        assert y[3, 5] == inf
        block[3, 5] = False
        assert (y[block] == 0).all()
    else:
        assert y[block].isnan().all()


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_token", "fp8_channel", "fp8_block"])
def test_under_a_given_scale_nan_and_infinity_are_each_by_itself(format):
    x = torch.tensor([[1.0, math.nan, math.inf, -math.inf]])
    y = quantize(x, format, scale=0.5).dequantize()
    assert y[0, 1].isnan() and y[0, [0, 2, 3]].tolist() == [1.0, 224.0, -224.0]


def test_a_given_scale_saturates():
    x = torch.tensor([[1.0, -1e3, 449.0, 448.0]])
    for format in ("fp8_tensor", "fp8_token", "fp8_channel", "fp8_block"):
        q = quantize(x, format, scale=1.0)
        assert q.dequantize().tolist() == [[1.0, -448.0, 448.0, 448.0]]


def test_every_expert_has_its_own_static_scale():
    """QN21: one scale per expert; one number stands for all of them."""
    x = torch.randn(3, 4, 32)
    scales = torch.tensor([1.0, 0.1, 10.0])
    q = quantize(x, "fp8_tensor", scale=scales)
    assert torch.equal(q.scale, scales)
    for e in range(3):
        assert torch.equal(q[e], quantize(x[e], "fp8_tensor", scale=scales[e]))
    for one in (0.5, torch.tensor(0.5), torch.tensor([0.5])):
        assert torch.equal(quantize(x, "fp8_tensor", scale=one).scale, torch.full((3,), 0.5))


@pytest.mark.parametrize("value", [0.0, 1e-40, 1.2e-38])
def test_a_scale_next_to_zero_spoils_no_other_expert(value):
    """QN03."""
    x = torch.randn(4, 5, 32)
    x[1, 0, :4] = 0
    scales = torch.tensor([0.01, value, 0.02, 0.03])
    q = quantize(x, "fp8_tensor", scale=scales)
    assert q.dequantize().isfinite().all()
    others = [0, 2, 3]
    assert torch.equal(q[others], quantize(x[others], "fp8_tensor", scale=scales[others]))


def test_a_static_global_scale():
    x = torch.randn(2, 8, 64)
    dynamic = quantize(x, "nvfp4")
    assert torch.equal(quantize(x, "nvfp4", global_scale=dynamic.global_scale), dynamic)
    amax = x.abs().amax((1, 2))
    assert torch.equal(dynamic.global_scale, amax / 2688)
    halves = quantize(x, "nvfp4", global_scale=torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
    for half, rows in ((0, slice(0, 4)), (1, slice(4, 8))):
        one = quantize(x[:, rows].contiguous(), "nvfp4", global_scale=halves.global_scale[:, half])
        assert torch.equal(halves.dequantize()[:, rows], one.dequantize())
    assert torch.equal(quantize(x, "nvfp4", global_scale=2.0).global_scale, torch.full((2,), 2.0))


def test_small_values_are_what_the_global_scale_is_for():
    """QN13."""
    x = torch.randn(16, 256) * 1e-4
    y = quantize(x, "nvfp4").dequantize()
    assert 0.95 < y.norm() / x.norm() < 1.05
    kept = (y != 0).reshape(16, 16, 16).any(-1)
    assert kept.all()  # no block of weights vanished


def test_the_scale_rules_of_mx():
    """QN06: a block maximum of 500."""
    x = torch.tensor([[500.0, *[1.0] * 31]])
    scale = {
        rule: decode_e8m0(quantize(x, "mxfp8", scale_rule=rule).scale).item()
        for rule in ("floor", "even", "ceil")
    }
    assert scale == {"floor": 1.0, "even": 2.0, "ceil": 2.0}
    assert quantize(x, "mxfp8").dequantize()[0, 0] == 512
    assert quantize(x, "mxfp8", scale_rule="floor").dequantize()[0, 0] == 448
    default = {name: FORMATS[name].default_scale_rule for name in ("mxfp8", "mxfp4")}
    assert default == {"mxfp8": "ceil", "mxfp4": "even"}
    for name, rule in default.items():
        assert torch.equal(quantize(x, name), quantize(x, name, scale_rule=rule))


def test_power_of_two_scales_are_made_before_the_codes():
    """QN07: a block of 3s; codes made with the unrounded scale would give 3.5."""
    x = torch.full((1, 128), 3.0)
    q = quantize(x, "fp8_block", scale_rule="ceil")
    assert q.scale.item() == 2.0**-7 and torch.equal(q.dequantize(), x)


@pytest.mark.parametrize("block_shape", [(1, 128), (128, 128)])
def test_scales_are_converted_to_powers_of_two_by_quantising_again(block_shape):
    """QN08."""
    q = quantize(torch.randn(256, 256), "fp8_block", block_shape=block_shape)
    again = quantize(q.dequantize(), "fp8_block", block_shape=block_shape, scale_rule="ceil")
    assert (again.scale.frexp().mantissa == 0.5).all()
    error = (again.dequantize() - q.dequantize()).norm() / q.dequantize().norm()
    assert 0 < error < 0.04


def test_what_power_of_two_scales_cost():
    """QN09: chosen, never automatic, and at most a bit of the mantissa: half as exact at worst."""
    x = torch.randn(256, 256)
    errors = []
    for scale_rule in (None, "ceil"):
        q = quantize(x, "fp8_block", block_shape=(128, 128), scale_rule=scale_rule)
        errors.append((q.dequantize() - x).norm() / x.norm())
    assert errors[0] < errors[1] < 2 * errors[0] and errors[1] < 0.04


def test_what_a_rounding_before_the_codes_does():
    """docs/formats.md: numbers that were bf16 on the way get other codes, 1 % apart."""
    x = torch.randn(512, 256)
    straight, rounded = (quantize(y, "fp8_block").dequantize() for y in (x, x.bfloat16().float()))
    assert 0.009 < (rounded - straight).norm() / straight.norm() < 0.013
