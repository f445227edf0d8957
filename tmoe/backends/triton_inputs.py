"""Rows on their way into a GEMM: their order and, for quantised weights, how they are rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tmoe.kernels.launch import multiplies_block_scaled
from tmoe.kernels.quantize_fp8 import quantize_fp8
from tmoe.kernels.quantize_mx import dequantize_mx, quantize_mx
from tmoe.kernels.quantize_nvfp4 import dequantize_nvfp4, quantize_nvfp4
from tmoe.kernels.quantize_ref import Rows
from tmoe.kernels.sort import OneToken, SortedTokens, sort_tokens
from tmoe.kernels.spread_codes import spread_codes
from tmoe.kernels.tiles import LayerTiles

from ..dispatch.problem import ExpertsSpec
from ..formats import FORMATS, QuantizedTensor
from ..formats.compute import block_of
from ..formats.format import FLOAT32
from ..formats.recipe import Recipe


def order_tokens(
    topk_ids: Tensor, spec: ExpertsSpec, num_experts: int, tiles: LayerTiles, *, by_expert: bool
) -> SortedTokens | OneToken:
    """Which rows are whose; the slots of a single token stay as they are, unless `by_expert`."""
    if len(topk_ids) == 1 and tiles.take_one_token and not by_expert:
        return OneToken(topk_ids, spec.first_expert, num_experts)
    return sort_tokens(
        topk_ids,
        num_experts=num_experts,
        first_expert=spec.first_expert,
        block_m=tiles.gate_up.block_m,
    )


@dataclass(frozen=True, slots=True)
class Inputs:
    """Rows as a GEMM takes them: numbers, or codes and their scales."""

    data: Tensor
    scale: Tensor | None = None  # fp32, one number, of rows, or of their blocks of 128
    blocks: Tensor | None = None  # scales of their blocks of 16 or 32, as they are stored


def round_rows(
    x: Tensor, recipe: Recipe, scale: Tensor | None, rows: Rows, expert_offsets: Tensor | None, *,
    scales_by_column: bool, copies: Tensor | None = None,
) -> Inputs:  # fmt: skip
    """Some rows of x, rounded. Where no unit multiplies codes together with fine scales, those are
    multiplied out: what the format holds, as numbers of x's dtype.

    A static scale is one number or, if the rows are in expert order, (E,). expert_offsets: of that
    order. scales_by_column and copies: as for `quantize_fp8`.
    """
    format, of_experts = recipe.format, scale is not None and scale.numel() > 1
    keep = multiplies_block_scaled(x.device)
    if scale is not None and not of_experts:
        scale = scale.reshape(())
    num_rows = len(x) if rows.index is None else len(rows.index)
    if format.has_global_scale:
        data, blocks, g = quantize_nvfp4(
            x, global_scale=scale, rows=rows, expert_offsets=expert_offsets if of_experts else None
        )
        g = scale_of_rows(g, expert_offsets, num_rows)
        if keep:
            return Inputs(data, g, blocks)
        return Inputs(dequantize_nvfp4(data, blocks, None, dtype=x.dtype), g)
    if format.scale is not FLOAT32:
        element = format.element.name
        data, blocks = quantize_mx(x, element=element, scale_rule=recipe.scale_rule, rows=rows)
        if keep:
            return Inputs(data, None, blocks)
        return Inputs(dequantize_mx(data, blocks, element=element, dtype=x.dtype))
    block = block_of(recipe.block_shape)
    if scale is not None and of_experts:
        block, scale = "row", scale_of_rows(scale, expert_offsets, num_rows)
    return Inputs(
        *quantize_fp8(
            x,
            block=block,
            scale=scale,
            rows=rows,
            scales_by_column=scales_by_column,
            copies=copies,
        )  # fmt: skip
    )


def take_codes(
    x: QuantizedTensor, order: SortedTokens | OneToken, specialized: bool
) -> tuple[Inputs, bool]:
    """Rows that were quantised before, as `round_rows` would have made them of what they were made
    of; and whether they are to be gathered."""
    format = FORMATS[x.format]
    if format.scale is FLOAT32:
        if specialized:
            assert isinstance(order, SortedTokens)
            return Inputs(*spread_codes(x.data, x.scale, order.slot_to_row)), False
        return Inputs(x.data, x.scale), True
    g = x.global_scale
    if multiplies_block_scaled(x.device):
        return Inputs(x.data, g, x.scale), True
    if format.has_global_scale:
        return Inputs(dequantize_nvfp4(x.data, x.scale, None, dtype=x.dtype), g), True
    element = format.element.name
    return Inputs(dequantize_mx(x.data, x.scale, element=element, dtype=x.dtype)), True


def scale_of_rows(of_experts: Tensor, expert_offsets: Tensor | None, num_rows: int) -> Tensor:
    """One number as (); (E,) as (S,): each row has its expert's."""
    if of_experts.numel() == 1:
        return of_experts.float().reshape(())
    assert expert_offsets is not None, "rows in expert order"
    row = torch.arange(num_rows, device=of_experts.device, dtype=expert_offsets.dtype)
    expert = torch.searchsorted(expert_offsets[1:], row, right=True)
    return of_experts.float()[expert.clamp(max=len(of_experts) - 1)]
