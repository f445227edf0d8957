"""The table of formats: its numbers against torch's, its shapes against examples."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from tmoe import quantize
from tmoe.formats import FORMATS, ElementType, Format
from tmoe.formats.format import E2M1, E4M3, E8M0


def test_the_formats_are_the_documented_ones():
    names = "fp8_tensor fp8_token fp8_channel fp8_block mxfp8 mxfp4 nvfp4".split()
    assert list(FORMATS) == names
    assert all(name == format.name for name, format in FORMATS.items())


def test_e4m3_is_torchs():
    info = torch.finfo(E4M3.storage)
    assert (E4M3.bits, E4M3.max, E4M3.smallest_normal) == (info.bits, info.max, info.tiny)
    assert E4M3.smallest_subnormal == info.smallest_normal * info.eps
    values = torch.arange(256, dtype=torch.uint8).view(E4M3.storage).float()
    assert values.isnan().any() == E4M3.has_nan
    assert values.isinf().any() == E4M3.has_inf
    finite = values[values.isfinite()].unique()
    assert finite[-1] - finite[-2] == E4M3.last_step


def test_e8m0_is_torchs():
    info = torch.finfo(torch.float8_e8m0fnu)
    assert (E8M0.bits, E8M0.max, E8M0.smallest_normal) == (info.bits, info.max, info.tiny)


def test_e2m1_values_follow_from_sign_exponent_and_mantissa():
    for code, (sign, exponent, mantissa) in enumerate(
        itertools.product((1, -1), range(4), range(2))
    ):
        value = mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2)
        assert E2M1.values[code] == sign * value
    assert str(E2M1.values[8]) == "-0.0"
    assert E2M1.last_step == 6.0 - 4.0


@pytest.mark.parametrize(
    "name, block_shape, shape, scale_shape, bits",
    [
        ("fp8_tensor", None, (6, 256), (), 8 + 32 / (6 * 256)),
        ("fp8_tensor", None, (3, 6, 256), (3,), 8 + 32 / (6 * 256)),
        ("fp8_tensor", None, (256,), (), 8 + 32 / 256),
        ("fp8_token", None, (6, 256), (6,), 8 + 32 / 256),
        ("fp8_channel", None, (3, 6, 256), (3, 6), 8 + 32 / 256),
        ("fp8_block", None, (6, 256), (6, 2), 8.25),
        ("fp8_block", (128, 128), (3, 256, 384), (3, 2, 3), 8 + 32 / 128**2),
        ("fp8_block", (128, 128), (130, 130), (2, 2), 8 + 4 * 32 / 130**2),
        ("mxfp8", None, (3, 6, 256), (3, 6, 8), 8.25),
        ("mxfp8", None, (33,), (2,), 8 + 2 * 8 / 33),
        ("mxfp4", None, (6, 256), (6, 8), 4.25),
        ("nvfp4", None, (3, 6, 256), (3, 6, 16), 4.5 + 32 / (6 * 256)),
        ("nvfp4", None, (0, 4, 16), (0, 4, 1), None),
    ],
)
def test_shapes_and_bits(name, block_shape, shape, scale_shape, bits):
    format = FORMATS[name]
    assert format.scale_shape(shape, block_shape) == scale_shape
    halved = (*shape[:-1], shape[-1] // 2)
    assert format.data_shape(shape) == (halved if format.element is E2M1 else shape)
    if bits is not None:
        assert format.bits_per_value(shape, block_shape) == pytest.approx(bits)


def test_a_matrix_or_half_of_its_rows_has_a_scale():
    assert FORMATS["fp8_tensor"].scale_shapes((3, 6, 16)) == ((3,), (3, 2))
    assert FORMATS["fp8_tensor"].scale_shapes((5, 16)) == ((),)
    assert FORMATS["fp8_channel"].scale_shapes((3, 6, 16)) == ((3, 6),)
    shapes = FORMATS["nvfp4"].global_scale_shapes
    assert shapes((3, 6, 16)) == ((3,), (3, 2))
    assert shapes((6, 16)) == ((), (2,))
    assert shapes((5, 16)) == ((),)  # an odd number of rows has no halves
    assert shapes((16,)) == ((),)
    assert FORMATS["mxfp4"].global_scale_shapes((6, 16)) == ()


def test_a_format_is_hashable_and_can_not_be_changed():
    assert len({*FORMATS.values()}) == len(FORMATS)
    with pytest.raises(FrozenInstanceError):
        FORMATS["mxfp8"].name = "another"


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="quantize: format must be one of fp8_tensor, .*, nvfp4"):
        Format.of("fp4", "quantize")
    with pytest.raises(TypeError, match="format must be a str or Format, got int"):
        Format.of(4, "quantize")
    assert Format.of(FORMATS["mxfp4"], "quantize") is FORMATS["mxfp4"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_says_what_happens_at_the_edges(name):
    format = FORMATS[name]
    for edge in ("zeros", "subnormals", "nan", "inf", "overflow"):
        assert getattr(format, edge), f"{name} says nothing about {edge}"
    assert format.default_scale_rule is None or format.default_scale_rule in format.scale_rules


E5M2 = ElementType("e5m2", 8, 57344.0, 2.0**-14, 2.0**-16, True, True, torch.float8_e5m2)


def test_a_format_that_no_quantiser_makes_is_refused_when_it_is_declared():
    """Its codes would be another type's, under its name."""
    with pytest.raises(ValueError, match=r"Format mine: element and scale must be e4m3 under flo"):
        replace(FORMATS["fp8_channel"], name="mine", element=E5M2)
    with pytest.raises(ValueError, match=r"got e4m3 under e4m3"):
        replace(FORMATS["fp8_channel"], name="mine", scale=E4M3)
    with pytest.raises(ValueError, match=r"\(\(1, 32\),\) for e2m1 under e8m0"):
        replace(FORMATS["mxfp4"], name="mine", block_shapes=((1, 64),))


def test_a_block_of_another_size_is_data(monkeypatch):
    """docs/guides/add-a-format.md"""
    mine = replace(FORMATS["fp8_block"], name="mine", block_shapes=((1, 64),))
    x = torch.randn(3, 4, 160)
    monkeypatch.setitem(FORMATS, "mine", mine)
    q = quantize(x, "mine")
    assert q.scale.shape == (3, 4, 3) and q.dequantize().shape == x.shape
    by_hand = quantize(x[..., :64].contiguous(), "fp8_token")
    assert torch.equal(q.dequantize()[..., :64], by_hand.dequantize())
