"""torch.ops.tmoe.quantize."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import Backend
from ..dispatch.problem import token_bucket
from ..formats.recipe import Recipe
from .operation import Facts, Operation


def _facts(x: Tensor, scale: Any, global_scale: Any, format: str, *words: Any) -> Facts:
    rows = token_bucket(prod(x.shape[:-1]))
    recipe = (format, *words)
    return Facts("quantize", rows, x.shape[-1], 0, 0, 1, x.dtype, recipe=recipe, scheme=format)


def _quantize(
    backend: Backend, x: Tensor, scale: Tensor | None, global_scale: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales that were given, or that the format hasn't, come back empty: no result may be an
    argument."""
    *words, _ = rest  # quantize has no `out`
    recipe, nothing = Recipe.from_words(*words), x.new_empty(0)
    data, scales, global_scales = backend.quantize(x, recipe, scale, global_scale)
    if scale is not None:
        scales = nothing
    if global_scales is None or global_scale is not None:
        global_scales = nothing
    return data, scales, global_scales


def _fake(
    x: Tensor, scale: Tensor | None, global_scale: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *words, _ = rest
    recipe = Recipe.from_words(*words)
    format = recipe.format
    data = x.new_empty(format.data_shape(x.shape), dtype=format.element.storage)
    scales = global_scales = x.new_empty(0)
    if scale is None:
        shape = format.scale_shape(x.shape, recipe.block_shape)
        scales = x.new_empty(shape, dtype=format.scale.storage)
    if format.has_global_scale and global_scale is None:
        shape = format.global_scale_shapes(x.shape)[0]
        global_scales = x.new_empty(shape, dtype=torch.float32)
    return data, scales, global_scales


Operation(
    "quantize",
    "Tensor x, Tensor? scale, Tensor? global_scale, str format, int block, str scale_rule",
    "(Tensor, Tensor, Tensor)",
    facts=_facts,
    compute=_quantize,
    fake=_fake,
    differentiable=(),
).define(has_out=False)
