"""Quantised weights as an op has them among its arguments: a list of tensors, and words."""

from __future__ import annotations

from torch import Tensor

from ..formats import QuantizedTensor
from ..formats.format import FORMATS


def columns_of(weight: Tensor, format: str) -> int:
    """D of a weight's codes (E, N, D), or of a plain weight, whose format is ""."""
    return weight.shape[-1] * (2 if format and FORMATS[format].is_packed else 1)


def weight_of(parts: list[Tensor], format: str, block: int, x: Tensor) -> QuantizedTensor:
    """The weight (E, N, D) that stands in an op's arguments as codes, scales and global scale."""
    data, scale, *global_scale = parts
    shape = (*data.shape[:-1], columns_of(data, format))
    return QuantizedTensor(
        data,
        scale,
        global_scale[0] if global_scale else None,
        format,
        FORMATS[format].block_shapes[block],
        shape,
        x.dtype,
    )
