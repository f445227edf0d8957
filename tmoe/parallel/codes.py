"""Codes on the wire: tokens that are quantised before they are sent, not after.

An FP8 or NVFP4 layer rounds its inputs anyway, each row by itself or with a scale that is known
beforehand, so quantising first sends half the bytes or a quarter, and gives the same bits. It isn't
done where an expert's rows have a scale or a weight of their own, since a token's codes then differ
from expert to expert; nor where gradients are needed, which codes have none of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import SCHEMES, QuantizedTensor
from ..formats.recipe import Recipe
from ..nn import Experts
from ..nn.lora import LORA
from ..ops import quantize


@dataclass(frozen=True, slots=True)
class Codes:
    """How a layer's tokens are quantised, and the static scale if there is one."""

    recipe: Recipe
    scale: Tensor | None

    def of(self, x: Tensor) -> QuantizedTensor:
        """x (T, H) as codes."""
        recipe, scale = self.recipe, self.scale
        if recipe.format.has_global_scale:
            return quantize(x, recipe.format, global_scale=scale)
        rule = None if scale is not None else recipe.scale_rule
        return quantize(
            x, recipe.format, scale=scale, block_shape=recipe.block_shape, scale_rule=rule
        )

    def row_bytes(self, hidden: int) -> int:
        """Of a token: its codes, and the scales that go with them."""
        format, block = self.recipe.format, self.recipe.block_shape
        codes = format.data_shape((1, hidden))[-1] * format.element.storage.itemsize
        if block[0] is None:  # one scale for all
            return codes
        scales = format.scale_shape((1, hidden), block)
        return codes + math.prod(scales) * format.scale.storage.itemsize


def codes_of(experts: Experts) -> Codes | None:
    """How tokens are quantised before they are sent to these experts; None: they aren't."""
    if hasattr(experts, LORA):  # adapters multiply what isn't rounded yet
        return None
    return codes_for(experts.scheme, experts.input_scale, experts.weight_on_input)


def codes_for(name: str | None, scale: Tensor | None, weight_on_input: bool) -> Codes | None:
    """`codes_of` experts of a scheme, with a static scale of their inputs or none."""
    scheme = SCHEMES.get(name or "")
    if scheme is None or scheme.inputs is None or weight_on_input:
        return None
    if (scale is None) == scheme.takes_scales or (scale is not None and scale.numel() > 1):
        return None
    return Codes(scheme.inputs, None if scale is None else scale.reshape(()))


def needs_gradients(x: Tensor, weights: Tensor) -> bool:
    """Whether what is sent is a part of a graph."""
    return torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
