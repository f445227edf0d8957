"""The public functions `quantize` and `dequantize`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import expect_type
from ..formats.format import Format
from ..formats.quantized_tensor import QuantizedTensor
from ..formats.recipe import Recipe, check_input, given_global_scale, given_scale
from ..library import operator

_QUANTIZE = operator("quantize")


def quantize(
    x: Tensor,
    format: str | Format,
    *,
    scale: Tensor | float | None = None,
    global_scale: Tensor | float | None = None,
    block_shape: Sequence[int | None] | None = None,
    scale_rule: str | None = None,
) -> QuantizedTensor:
    """Round `x` to a number format.

    Args:
        x: (..., M, K) or (K,), float32, bfloat16 or float16, any strides; K is the dimension that
            will be contracted, leading dimensions are experts. The last block of a row may be
            partial; 4-bit formats need an even K. Computed in fp32.
        format: fp8_tensor, fp8_token, fp8_channel, fp8_block, mxfp8, mxfp4, nvfp4, or a `Format`;
            ``tmoe.formats.FORMATS`` says what each one is.
        scale: fp8_* only: a static scale instead of one that is computed, of the format's scale
            shape (fp8_tensor: one per expert, or (..., 2) for the two halves of its rows), or one
            number for all blocks. What lies beyond 448 · scale saturates.
        global_scale: nvfp4 only: a static multiplier (value = code · scale · global_scale), one
            per expert, (..., 2) for the two halves of an expert's rows, or one number.
        block_shape: fp8_block only: (1, 128), the default, for activations; (128, 128) for weights.
        scale_rule: how a power-of-two scale is chosen, "floor", "even" or "ceil". None is "ceil"
            for mxfp8 and "even" for mxfp4. fp8_block offers "ceil"; None leaves its scales as they
            are.

    Returns:
        A `QuantizedTensor` of x's shape and (nominal) dtype.

    Scales that live on a GPU aren't checked for zeros and NaN: that would mean waiting for it.

    Raises:
        TypeError: an argument that isn't of its class.
        ValueError: an unknown format, or a dtype, a shape or a value that doesn't fit it.
    """
    op = "quantize"
    recipe = Recipe.of(op, format, block_shape, scale_rule)
    check_input(op, x, recipe.format)
    given = given_scale(op, scale, x, recipe)
    given_global = given_global_scale(op, global_scale, x, recipe.format)
    data, scales, global_scales = _QUANTIZE(x, given, given_global, *recipe.words, False)
    if recipe.format.has_global_scale and given_global is None:
        given_global = global_scales
    return QuantizedTensor(
        data,
        scales if given is None else given,
        given_global,
        recipe.format.name,
        recipe.block_shape,
        x.shape,
        x.dtype,
    )


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of `q` as an ordinary tensor: code · scale (· global scale) in fp32, then `dtype`.

    Raises:
        TypeError: `q` isn't a `QuantizedTensor`.
        ValueError: `dtype` isn't float32, bfloat16 or float16.
    """
    expect_type(q, QuantizedTensor, "dequantize", "q")
    return q.dequantize(dtype)
