"""Experts with quantised weights in plain torch: what the schemes mean, and the slowest way there.

Operands are rounded to their formats and multiplied as fp32, which holds every product of two codes
exactly. One expert's weights are taken apart at a time, so quantised weights stay quantised; the
backward does so again. Quantised weights are frozen: gradients go through them to the rows. Through
the rounding of inputs they go straight: as if it were not there, clamped values included.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tmoe.kernels import quantize_ref as ref

from ..formats import QuantizedTensor
from ..formats.compute import dequantize_parts, quantize_parts
from ..formats.recipe import Recipe


def project(
    rows: Tensor, weight: QuantizedTensor, bias: Tensor | None, expert_offsets: Tensor
) -> Tensor:
    """rows (S, D) fp32 in expert order, weight (E, N, D) -> (S, N); rows of no expert are 0."""
    return _Project.apply(rows, weight, bias, expert_offsets)


class _Project(torch.autograd.Function):
    """Keeps no rows: the weights are frozen."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: QuantizedTensor, bias: Tensor | None, offsets: Tensor
    ) -> Tensor:
        ctx.weight, ctx.offsets = weight, offsets
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        y = rows.new_zeros(rows.shape[0], weight.shape[1])
        for e, (start, end) in enumerate(pairwise(offsets.tolist())):
            if start < end:
                y[start:end] = F.linear(rows[start:end], weight[e].dequantize())
                if bias is not None:
                    y[start:end] += bias[e].float()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        wants_rows, _, wants_bias, _ = ctx.needs_input_grad
        weight, dbias = ctx.weight, None
        drows = dy.new_zeros(dy.shape[0], weight.shape[2]) if wants_rows else None
        if wants_bias:
            shape, dtype = ctx.bias
            dbias = dy.new_zeros(shape, dtype=dtype)
        for e, (start, end) in enumerate(pairwise(ctx.offsets.tolist())):
            if drows is not None and start < end:
                drows[start:end] = dy[start:end] @ weight[e].dequantize()
            if dbias is not None and start < end:
                dbias[e] = dy[start:end].sum(0)
        return drows, None, dbias, None


class _StraightThrough(torch.autograd.Function):
    """`values`, with the gradient of `rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def rounded(
    rows: Tensor, recipe: Recipe | None, scale: Tensor | None, expert_offsets: Tensor
) -> Tensor:
    """rows (S, D) fp32 in expert order as a format holds them. A static scale is one number, or
    (E,), one per expert; a dynamic one that a whole matrix shares is that of all rows."""
    if recipe is None:
        return rows
    return _StraightThrough.apply(rows, _rounded(rows.detach(), recipe, scale, expert_offsets))


def _rounded(rows: Tensor, recipe: Recipe, scale: Tensor | None, expert_offsets: Tensor) -> Tensor:
    if scale is None or scale.numel() == 1:
        scale = None if scale is None else scale.float().reshape(())
        is_global = recipe.format.has_global_scale
        parts = quantize_parts(
            rows, recipe, None if is_global else scale, scale if is_global else None, "torch"
        )
        return dequantize_parts(*parts, recipe.format, recipe.block_shape, torch.float32)
    if recipe.format.has_global_scale:
        data, scales, g = ref.quantize_nvfp4_ref(
            rows, global_scale=scale, expert_offsets=expert_offsets
        )
        return ref.dequantize_nvfp4_ref(
            data, scales, g, expert_offsets=expert_offsets, dtype=torch.float32
        )
    number = torch.arange(len(rows), device=rows.device, dtype=expert_offsets.dtype)
    expert = torch.searchsorted(expert_offsets[1:], number, right=True)
    of_row = scale.float()[expert.clamp(max=len(scale) - 1)]
    data, scales = ref.quantize_fp8_ref(rows, block="row", scale=of_row)
    return ref.dequantize_fp8_ref(data, scales, block="row", dtype=torch.float32)
