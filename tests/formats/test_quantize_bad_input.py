"""What `tmoe.quantize` and `tmoe.dequantize` refuse, and what they say."""

from __future__ import annotations

import math

import pytest
import torch

from tmoe import dequantize, quantize

X = torch.randn(4, 64)
NV = "nvfp4"
REFUSED = {
    "unknown-format": ((X, "int8"), {}, "format must be one of fp8_tensor, fp8_token"),
    "integers": ((torch.ones(4, 64, dtype=torch.int32), "mxfp8"), {}, "x must be of dtype float32"),
    "complex": ((X.to(torch.complex64), "mxfp8"), {}, "x must be of dtype float32"),
    "scalar": ((torch.tensor(1.0), "mxfp8"), {}, r"x must be of shape \(..., K\)"),
    "empty-rows": ((torch.ones(4, 0), "mxfp8"), {}, "K at least 1"),
    "odd-rows": ((torch.randn(4, 63), "mxfp4"), {}, r"x must be of even row length.*\(4, 63\)"),
    "odd-rows-nvfp4": ((torch.randn(4, 63), NV), {}, "x must be of even row length: nvfp4 packs"),
    "block-shape": ((X, "mxfp8"), {"block_shape": (1, 16)}, r"must be \(1, 32\) for mxfp8"),
    "scale-rule": ((X, "mxfp8"), {"scale_rule": "up"}, "None or floor or even or ceil for mxfp8"),
    "scale-rule-nvfp4": ((X, NV), {"scale_rule": "ceil"}, "scale_rule must be None for nvfp4"),
    "scale-rule-fp8": ((X, "fp8_block"), {"scale_rule": "floor"}, "None or ceil for fp8_block"),
    "scale-of-mx": ((X, "mxfp8"), {"scale": 1.0}, "scale must be None for mxfp8"),
    "scale-shape": ((X, "fp8_token"), {"scale": torch.ones(3)}, r"shape \(4,\), or one number"),
    "scale-dtype": ((X, "fp8_token"), {"scale": torch.ones(4, dtype=torch.int32)}, "scale must"),
    "scale-nan": ((X, "fp8_token"), {"scale": math.nan}, "scale must be finite and at least 0"),
    "scale-negative": ((X, "fp8_token"), {"scale": -torch.ones(4)}, "finite and at least 0"),
    "scale-and-rule": (
        (X, "fp8_block"), {"scale": 1.0, "scale_rule": "ceil"}, "scale_rule must be None with a"
    ),
    "scale-elsewhere": (
        (X, "fp8_token"), {"scale": torch.ones(4, device="meta")}, "scale must be on x's device"
    ),
    "global-scale-of-mx": ((X, "mxfp4"), {"global_scale": 1.0}, "must be None for mxfp4"),
    "global-scale-shape": ((X, NV), {"global_scale": torch.ones(3)}, r"shape \(\) or \(2,\)"),
    "global-scale-zero": ((X, NV), {"global_scale": 0}, "must be finite and above 0, got 0"),
    "global-scale-nan": ((X, NV), {"global_scale": torch.tensor(math.nan)}, "finite and above 0"),
    "global-scale-inf": ((X, NV), {"global_scale": math.inf}, "finite and above 0, got inf"),
    "gradient": ((X.clone().requires_grad_(), "mxfp8"), {}, "x must be detached"),
    "quantised": ((quantize(X, "mxfp8"), "mxfp8"), {}, r"call .dequantize\(\) first"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    arguments, options, match = REFUSED[case]
    with pytest.raises(ValueError, match=match) as error:
        quantize(*arguments, **options)
    assert str(error.value).startswith("quantize: ")


def test_wrong_classes_are_type_errors():
    for call in (
        lambda: quantize([1.0], "mxfp8"),
        lambda: quantize(X, 8),
        lambda: quantize(X, "fp8_tensor", scale="1"),
        lambda: quantize(X, "fp8_block", block_shape=128),
        lambda: quantize(X, "mxfp8", scale_rule=1),
        lambda: dequantize(X),
        lambda: quantize(X, "mxfp8").dequantize("float32"),
    ):
        with pytest.raises(TypeError, match="must be a"):
            call()
    with pytest.raises(ValueError, match="dequantize: dtype must be float32, bfloat16"):
        dequantize(quantize(X, "mxfp8"), torch.int8)


def test_no_grad_is_enough():
    weight = torch.nn.Parameter(X.clone())
    with torch.no_grad():
        assert not quantize(weight, "mxfp8").requires_grad
