"""Where FlashInfer's kernels lose precision: the first projection's input, its result, and the
activation's result. By tmoe's reference quantisers, which other tests compare with other libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tmoe.kernels import quantize_ref as ref

Rounds = Callable[[Tensor], Tensor]  # fp64 (rows, columns) -> the same, rounded


def exact(x: Tensor) -> Tensor:
    return x


def to(dtype: torch.dtype) -> Rounds:
    """A cast there and back."""
    return lambda x: x.to(dtype).double()


def fp8(x: Tensor) -> Tensor:
    """e4m3; what is beyond becomes the largest."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).double()


def fp8_of_128(x: Tensor) -> Tensor:
    """e4m3 with a scale for every 128 of a row."""
    codes, scale = ref.quantize_fp8_ref(x.float(), block=(1, 128))
    return codes.double() * scale.double().repeat_interleave(128, dim=1)


def mxfp8(x: Tensor) -> Tensor:
    codes, scale = ref.quantize_mx_ref(x.float(), element="e4m3", scale_rule="ceil")
    return ref.dequantize_mx_ref(codes, scale, element="e4m3", dtype=torch.float64)


def nvfp4(x: Tensor) -> Tensor:
    """Of what the global scale has already divided."""
    codes, scale, one = ref.quantize_nvfp4_ref(x.float(), global_scale=torch.ones(()))
    return ref.dequantize_nvfp4_ref(codes, scale, one, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Of one kernel."""

    input: Rounds = exact
    first: Rounds = exact
    hidden: Rounds = exact
    answer: Rounds = exact  # an expert's, before the sum over experts
