"""Quantisers: (T, H) rows to every number format."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tmoe.bench.cases import num_inputs, with_backend
from tmoe.bench.roofline import Work

FORMATS = {
    "fp8_tensor static": ("fp8_tensor", {"scale": 0.01}),
    "fp8_tensor dynamic": ("fp8_tensor", {}),
    "fp8_token": ("fp8_token", {}),
    "fp8_block": ("fp8_block", {}),
    "fp8_block power of two": ("fp8_block", {"scale_rule": "ceil"}),
    "mxfp8": ("mxfp8", {}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4 static": ("nvfp4", {"global_scale": 0.002}),
    "nvfp4 dynamic": ("nvfp4", {}),
}
IMPLEMENTATIONS = {name: with_backend(tmoe.quantize, name) for name in ("triton", "torch")}


@pytest.mark.parametrize("name", FORMATS)
def test_quantize(measure, shape, tokens, backend, name, device, dtype):
    """The same codes and scales as the reference's, bit by bit. A dynamic scale of the whole matrix
    means that the matrix is read twice, which the floor doesn't count."""
    format, options = FORMATS[name]
    # Given as tensors: a number would be copied to the device by every call.
    options = {
        key: torch.tensor(value, device=device) if isinstance(value, float) else value
        for key, value in options.items()
    }
    inputs = [
        (torch.randn(tokens, shape.hidden, device=device, dtype=dtype),)
        for _ in range(num_inputs(tokens))
    ]

    def quantize(x):
        return IMPLEMENTATIONS[backend](x, format, **options)

    def check(got, x):
        want = IMPLEMENTATIONS["torch"](x, format, **options)
        for part, wanted in zip(got.parts(), want.parts(), strict=True):
            assert torch.equal(
                part.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)
            )

    x = inputs[0][0]
    work = Work(0, x.nbytes + quantize(x).nbytes)
    measure(quantize, inputs, check, work, format=name)
