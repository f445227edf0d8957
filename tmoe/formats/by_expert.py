"""Quantise the experts of a layer one after another: little memory, and the error of each."""

from __future__ import annotations

import torch
from torch import Tensor

from .compute import quantize_parts
from .error_report import ErrorSums
from .format import Format
from .quantized_tensor import QuantizedTensor
from .recipe import Recipe


def why_not_quantize(shape: tuple[int, ...], dtype: torch.dtype, format: Format) -> str | None:
    """Why a matrix (..., N, K) can't be quantised to the format, with the numbers, or None."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it is {str(dtype).removeprefix('torch.')}, not float32, bfloat16 or float16"
    if format.is_packed and shape[-1] % 2:
        return f"its rows have {shape[-1]} values and {format.name} packs two into a byte"
    return None


@torch.no_grad()
def quantize_matrix(x: Tensor, recipe: Recipe) -> QuantizedTensor:
    """One expert's matrix (N, K).

    Raises:
        ValueError: NaN or Inf, which a file or a layer should not carry on in silence.
    """
    x = x.detach()
    if not bool(torch.isfinite(x).all()):
        raise ValueError("it holds NaN or Inf")
    parts = quantize_parts(x, recipe, None, None)
    return QuantizedTensor(*parts, recipe.format.name, recipe.block_shape, x.shape, x.dtype)


@torch.no_grad()
def quantize_by_expert(weight: Tensor, recipe: Recipe) -> tuple[QuantizedTensor, ErrorSums]:
    """A layer's matrices (E, N, K), any strides: what `tmoe.quantize` makes of all at once.

    Beside the result no more than one expert is in memory.

    Raises:
        ValueError: an expert with NaN or Inf; it is named.
    """
    result = recipe.empty(weight.shape, device=weight.device, dtype=weight.dtype)
    sums = ErrorSums()
    for e, matrix in enumerate(weight.detach()):
        try:
            q = quantize_matrix(matrix, recipe)
        except ValueError as found:
            raise ValueError(f"expert {e}: {found}") from None
        result[e].copy_(q)
        sums += ErrorSums.of(matrix, q)
    return result, sums
