"""`QuantizedTensor.from_parts`: what checkpoints hold, and what is refused."""

from __future__ import annotations

import pytest
import torch

from tmoe import quantize
from tmoe.formats import FORMATS, QuantizedTensor, decode_e8m0

from_parts = QuantizedTensor.from_parts
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def codes(*shape, format="fp8_token"):
    storage = FORMATS[format].element.storage
    return torch.randint(0, 0x7F, shape, dtype=torch.uint8).view(storage)  # positive, no NaN


def e8m0(*shape):
    return torch.randint(100, 150, shape, dtype=torch.uint8)


def e4m3(*shape):
    return torch.rand(shape).add(0.5).to(FP8)


@pytest.mark.parametrize(
    "format, data, scale, shape",
    [
        ("fp8_tensor", codes(6, 8), torch.tensor(0.5), (6, 8)),
        ("fp8_tensor", codes(6, 8), torch.tensor([0.5]), (6, 8)),
        ("fp8_tensor", codes(3, 6, 8), torch.rand(3), (3, 6, 8)),
        ("fp8_tensor", codes(3, 6, 8), torch.rand(3, 1, 1), (3, 6, 8)),
        ("fp8_channel", codes(6, 8), torch.rand(6), (6, 8)),
        ("fp8_channel", codes(6, 8), torch.rand(6, 1), (6, 8)),
        ("fp8_channel", codes(6, 8), torch.rand(6, 1).bfloat16(), (6, 8)),
        ("fp8_channel", codes(3, 6, 8), torch.rand(3, 6, 1), (3, 6, 8)),
        ("fp8_block", codes(6, 130), torch.rand(6, 2), (6, 130)),
        ("fp8_block", codes(6, 130), e8m0(6, 2).view(E8M0), (6, 130)),
        ("mxfp8", codes(6, 40), e8m0(6, 2), (6, 40)),
        ("mxfp8", codes(6, 40), e8m0(6, 2).view(E8M0), (6, 40)),
        ("mxfp4", codes(3, 6, 32, format="mxfp4"), e8m0(3, 6, 2), (3, 6, 64)),
        ("mxfp4", codes(3, 6, 32, format="mxfp4").view(torch.int8), e8m0(3, 6, 2), (3, 6, 64)),
    ],
)
def test_what_checkpoints_hold(format, data, scale, shape):
    q = from_parts(data, scale, format=format)
    spec = FORMATS[format]
    assert (q.format, tuple(q.shape), q.dtype) == (format, shape, torch.bfloat16)
    assert q.data.dtype == spec.element.storage and q.scale.dtype == spec.scale.storage
    assert tuple(q.scale.shape) == spec.scale_shape(shape)
    assert q.global_scale is None and q.block_shape == spec.block_shape
    assert torch.equal(q.data.view(torch.uint8), data.view(torch.uint8))
    wide = scale.view(torch.uint8) if scale.dtype == E8M0 else scale
    if scale.dtype == E8M0 and spec.scale.storage == torch.float32:
        wide = decode_e8m0(wide)  # exactly
    assert torch.equal(q.scale, wide.to(q.scale.dtype).reshape(q.scale.shape))


def test_fp8_tensor_has_one_scale_or_two_per_expert():
    """Gate and up that were quantised apart."""
    data, halves = codes(3, 6, 8), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    both = from_parts(data, halves, format="fp8_tensor")
    assert both.scale.shape == (3, 2) and both.bits_per_value == 8 + 2 * 32 / 48
    want = data.float() * halves.repeat_interleave(3, 1)[..., None]
    assert torch.equal(both.dequantize(), want)
    assert torch.equal(both[1].dequantize(), want[1])
    assert torch.equal(both[1:].dequantize(torch.bfloat16), want[1:].bfloat16())
    assert torch.equal(quantize(want, "fp8_tensor", scale=halves), both)
    with pytest.raises(ValueError, match=r"\(3,\) for fp8_tensor.*got \(3, 2\)"):
        from_parts(codes(3, 5, 8), halves, format="fp8_tensor")  # an odd number has no halves


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1), (3, 2)])
def test_nvfp4_has_one_global_scale_or_two_per_expert(shape):
    data = codes(3, 6, 32, format="nvfp4")
    q = from_parts(data, e4m3(3, 6, 4), format="nvfp4", global_scale=torch.rand(shape) + 0.1)
    assert tuple(q.global_scale.shape) == ((3, 2) if shape == (3, 2) else (3,))
    assert q.global_scale.dtype == torch.float32


def test_the_halves_of_the_rows_have_the_global_scale_that_is_theirs():
    data, scale = codes(3, 6, 32, format="nvfp4"), e4m3(3, 6, 4)
    halves = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    both = from_parts(data, scale, format="nvfp4", global_scale=halves).dequantize()
    for half in (0, 1):
        one = from_parts(data, scale, format="nvfp4", global_scale=halves[:, half]).dequantize()
        rows = slice(3 * half, 3 * half + 3)
        assert torch.equal(both[:, rows], one[:, rows])


def test_rows_may_be_split_into_blocks_as_gpt_oss_stores_them():
    """SH07: 2880 is 90 blocks of 32; the shape is given, never inferred from a count."""
    data, scale = codes(2, 4, 90, 16, format="mxfp4"), e8m0(2, 4, 90)
    q = from_parts(data, scale, format="mxfp4", shape=(2, 4, 2880))
    assert tuple(q.shape) == (2, 4, 2880) and tuple(q.data.shape) == (2, 4, 1440)
    assert torch.equal(q.data, data.reshape(2, 4, 1440))
    padded = e8m0(2, 4, 92)  # columns rounded up to 4
    with pytest.raises(ValueError, match=r"scale must be of shape \(2, 4, 90\).*got \(2, 4, 92\)"):
        from_parts(data, padded, format="mxfp4", shape=(2, 4, 2880))


def test_a_strided_payload_becomes_contiguous():
    data = codes(8, 6).t()
    q = from_parts(data, torch.rand(6), format="fp8_channel")
    assert q.data.is_contiguous() and torch.equal(q.data.float(), data.float())


def test_e8m0_byte_0_is_a_number():
    """QN20."""
    one = torch.full((1, 32), 1.0).to(FP8)
    for byte, scale in ((0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127)):
        q = from_parts(one, torch.tensor([[byte]], dtype=torch.uint8), format="mxfp8")
        assert (q.dequantize() == scale).all()


def test_a_scale_of_zero_dequantises_to_zero():
    """QN01: a library stored scale 0 for a tile of zeros."""
    data = codes(2, 8)
    q = from_parts(data, torch.tensor([0.0, 1.0]), format="fp8_channel")
    assert (q.dequantize()[0] == 0).all() and torch.equal(q.dequantize()[1], data[1].float())


ONE = torch.ones(())
MX4, NV4 = codes(3, 6, 32, format="mxfp4"), codes(3, 6, 32, format="nvfp4")
REFUSED = {
    "unknown-format": (codes(6, 8), torch.rand(6), {"format": "fp4"}, "format must be one of"),
    "bf16-codes": (torch.rand(6, 8), torch.rand(6), {"format": "fp8_token"}, "data must be of dt"),
    "fnuz-codes": (
        codes(6, 8).view(torch.float8_e4m3fnuz), torch.rand(6), {"format": "fp8_token"},
        "data must be of dtype float8_e4m3fn for fp8_token, got torch.float8_e4m3fnuz",
    ),
    "fp16-scale": (
        codes(6, 8), torch.rand(6).half(), {"format": "fp8_token"}, "scale must be of dtype fl"
    ),
    "int-scale-for-fp8": (codes(6, 8), e8m0(6), {"format": "fp8_token"}, "scale must be of dtype"),
    "fp32-scale-for-mx": (MX4, torch.rand(3, 6, 2), {"format": "mxfp4"}, "scale must be of dtype"),
    "e8m0-nan": (
        MX4, torch.full((3, 6, 2), 255, dtype=torch.uint8), {"format": "mxfp4"},
        "e8m0 NaN, byte 255, got 255",
    ),
    "e8m0fnu-nan": (
        codes(1, 32), torch.tensor([[255]], dtype=torch.uint8).view(E8M0), {"format": "mxfp8"},
        "e8m0 NaN, byte 255, got 255",
    ),
    "fp8-scale-nan": (
        codes(2, 8), torch.tensor([1.0, torch.nan]), {"format": "fp8_token"},
        "scale must be finite and at least 0, got nan",
    ),
    "fp8-scale-inf": (codes(1, 8), torch.tensor([torch.inf]), {"format": "fp8_token"}, "got inf"),
    "fp8-scale-negative": (codes(1, 8), -torch.ones(1), {"format": "fp8_token"}, "got -1.0"),
    "wrong-scale-shape": (codes(6, 8), torch.rand(8), {"format": "fp8_token"}, r"\(6,\).*\(8,\)"),
    "row-of-scales-for-a-tensor": (
        codes(6, 8), torch.rand(6), {"format": "fp8_tensor"},
        r"shape \(\) or \(2,\) for fp8_tensor.*\(6,\)",
    ),
    "other-block-shape": (
        codes(256, 256), torch.rand(2, 2), {"format": "fp8_block"}, r"\(256, 2\).*got \(2, 2\)"
    ),
    "unknown-block-shape": (
        codes(64, 64), torch.rand(1, 1), {"format": "fp8_block", "block_shape": (64, 64)},
        r"\(1, 128\) or \(128, 128\) for fp8_block, got \(64, 64\)",
    ),
    "shape-that-does-not-fit": (
        MX4, e8m0(3, 6, 2), {"format": "mxfp4", "shape": (3, 6, 62)}, r"data must be of shape"
    ),
    "odd-rows": (
        MX4, e8m0(3, 6, 2), {"format": "mxfp4", "shape": (3, 6, 63)}, "of even row length"
    ),
    "global-scale-missing": (NV4, e4m3(3, 6, 4), {"format": "nvfp4"}, "must be given for nvfp4"),
    "global-scale-unwanted": (
        MX4, e8m0(3, 6, 2), {"format": "mxfp4", "global_scale": ONE}, "global_scale must be None"
    ),
    "one-global-scale-for-all": (
        NV4, e4m3(3, 6, 4), {"format": "nvfp4", "global_scale": ONE}, r"shape \(3,\) or \(3, 2\)"
    ),
    "nvfp4-scale-nan": (
        NV4, torch.full((3, 6, 4), torch.nan).to(FP8),
        {"format": "nvfp4", "global_scale": torch.ones(3)}, "finite and at least 0, got nan",
    ),
    "nvfp4-scale-negative": (
        NV4, (-torch.ones(3, 6, 4)).to(FP8),
        {"format": "nvfp4", "global_scale": torch.ones(3)}, "finite and at least 0, got -1.0",
    ),
    "integer-dtype": (
        codes(6, 8), torch.rand(6), {"format": "fp8_token", "dtype": torch.int8}, "dtype must be"
    ),
    "scale-elsewhere": (
        codes(6, 8).to("meta"), torch.rand(6), {"format": "fp8_token"}, "scale must be on meta"
    ),
} | {
    f"global-scale-{value}": (
        NV4, e4m3(3, 6, 4),
        {"format": "nvfp4", "global_scale": torch.tensor([1.0, value, 1.0])},
        f"global_scale must be finite and above 0, got {value}",
    )
    for value in (0.0, torch.nan, torch.inf, -1.0)
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    data, scale, options, match = REFUSED[case]
    with pytest.raises(ValueError, match=match) as error:
        from_parts(data, scale, **options)
    assert str(error.value).startswith("QuantizedTensor.from_parts: ")


def test_a_skeleton_on_the_meta_device_has_no_values_to_check():
    data, scale = NV4.to("meta"), e4m3(3, 6, 4).to("meta")
    q = from_parts(data, scale, format="nvfp4", global_scale=torch.ones(3, device="meta"))
    assert q.is_meta and tuple(q.shape) == (3, 6, 64)


def test_wrong_classes_are_type_errors():
    for data, scale in ([[1.0]], torch.rand(1)), (codes(1, 8), [1.0]):
        with pytest.raises(TypeError, match="QuantizedTensor.from_parts: .* must be a Tensor"):
            from_parts(data, scale, format="fp8_token")
