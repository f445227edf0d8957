"""The arithmetic behind quantising: Triton's kernels on a GPU, their references in torch elsewhere.

Both give the same bits. This is the one file of `tmoe.formats` that knows about kernels.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .format import FLOAT32, Block, Format

if TYPE_CHECKING:
    from .recipe import Recipe

# The kernels' words for blocks that aren't (rows, columns).
_BLOCKS: dict[Block, str] = {(None, None): "tensor", (1, None): "row"}


def quantize_parts(
    x: Tensor,
    recipe: Recipe,
    scale: Tensor | None,
    global_scale: Tensor | None,
    provider: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and global scale of a checked `x` (..., K); by "triton", "torch", or whichever
    is the one for x's device."""
    kernels, format = _kernels(provider or _provider(x.device.type)), recipe.format
    rows, given = x if x.ndim > 1 else x.unsqueeze(0), scale
    if format.has_global_scale:
        data, scale, global_scale = kernels.quantize_nvfp4(rows, global_scale=global_scale)
    elif format.scale is FLOAT32:
        power_of_two = recipe.scale_rule == "ceil"
        rows = _by_halves(rows, scale, recipe.block_shape)
        data, scale = kernels.quantize_fp8(
            rows, block=block_of(recipe.block_shape), scale=scale, power_of_two=power_of_two
        )
    else:
        data, scale = kernels.quantize_mx(
            rows, element=format.element.name, scale_rule=recipe.scale_rule
        )
    data = data.view(format.data_shape(x.shape))
    scales = scale.view(format.scale_shape(x.shape, recipe.block_shape)) if given is None else given
    return data, scales, global_scale


def dequantize_parts(
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    format: Format,
    block_shape: Block,
    dtype: torch.dtype,
) -> Tensor:
    """code · scale (· global scale) in fp32, then `dtype`."""
    kernels = _kernels(_provider(data.device.type))
    rows = data if data.ndim > 1 else data.unsqueeze(0)
    if data.ndim == 1 and block_shape[0] is not None:
        scale = scale.unsqueeze(0)
    if format.has_global_scale:
        values = kernels.dequantize_nvfp4(rows, scale, global_scale, dtype=dtype)
    elif format.scale is FLOAT32:
        halves = _by_halves(rows, scale, block_shape)
        values = kernels.dequantize_fp8(
            halves, scale, block=block_of(block_shape), dtype=dtype
        ).view(rows.shape)
    else:
        values = kernels.dequantize_mx(rows, scale, element=format.element.name, dtype=dtype)
    return values if data.ndim > 1 else values[0]


def block_of(block_shape: Block) -> str | Block:
    """The block shape in the FP8 kernels' words."""
    return _BLOCKS.get(block_shape) or block_shape


def _by_halves(rows: Tensor, scale: Tensor | None, block_shape: Block) -> Tensor:
    """rows (..., M, K) as (..., 2, M / 2, K) if each half has a scale of its own."""
    if block_shape != (None, None) or scale is None or scale.ndim < rows.ndim - 1:
        return rows
    return rows.unflatten(-2, (2, rows.shape[-2] // 2))


def _provider(device_type: str) -> str:
    return "triton" if device_type == "cuda" and find_spec("triton") else "torch"


@cache
def _kernels(provider: str) -> SimpleNamespace:
    """The six functions of "triton" or "torch", imported when they are first needed."""
    if provider == "triton":
        from tmoe.kernels.quantize_fp8 import dequantize_fp8, quantize_fp8
        from tmoe.kernels.quantize_mx import dequantize_mx, quantize_mx
        from tmoe.kernels.quantize_nvfp4 import dequantize_nvfp4, quantize_nvfp4

        return SimpleNamespace(
            quantize_fp8=quantize_fp8, quantize_mx=quantize_mx, quantize_nvfp4=quantize_nvfp4,
            dequantize_fp8=dequantize_fp8, dequantize_mx=dequantize_mx,
            dequantize_nvfp4=dequantize_nvfp4,
        )  # fmt: skip
    from tmoe.kernels import quantize_ref as ref

    return SimpleNamespace(
        quantize_fp8=ref.quantize_fp8_ref, quantize_mx=ref.quantize_mx_ref,
        quantize_nvfp4=ref.quantize_nvfp4_ref, dequantize_fp8=ref.dequantize_fp8_ref,
        dequantize_mx=ref.dequantize_mx_ref, dequantize_nvfp4=ref.dequantize_nvfp4_ref,
    )  # fmt: skip
