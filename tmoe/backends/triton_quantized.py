"""Experts with quantised weights as Triton kernels: quantise, gate_up, quantise, down, combine."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tmoe.kernels.clear_tail import clear_tail
from tmoe.kernels.combine import combine
from tmoe.kernels.quantize_fp8 import quantize_fp8
from tmoe.kernels.quantize_mx import dequantize_mx, quantize_mx
from tmoe.kernels.quantize_nvfp4 import dequantize_nvfp4, quantize_nvfp4
from tmoe.kernels.quantized_gemm import quantized_gemm
from tmoe.kernels.sort import sort_tokens, tile_rows
from tmoe.kernels.tiles import choose_quantized_tiles

from ..dispatch.problem import ExpertsSpec, StaticScales
from ..formats import FORMATS, QuantizedTensor
from ..formats.compute import block_of
from ..formats.format import FLOAT32
from ..formats.recipe import Recipe
from ..formats.scheme import SCHEMES
from ..options import current


def quantized_experts(
    x: Tensor,
    gate_up_proj: QuantizedTensor,
    down_proj: QuantizedTensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    spec: ExpertsSpec,
    out: Tensor | None,
    scales: StaticScales,
) -> Tensor:
    """x (T, H) bf16 or fp32 -> (T, H); see `tmoe.dispatch.backend.Backend`."""
    assert spec.scheme is not None
    (T, K), (E, H, I) = topk_ids.shape, down_proj.shape
    S, activation, inputs = T * K, spec.activation, SCHEMES[spec.scheme].inputs
    tiles = choose_quantized_tiles(
        x.device,
        rows_per_expert=S / spec.num_experts,
        batch_invariant=current().batch_invariant,
    )
    order = sort_tokens(
        topk_ids, num_experts=E, first_expert=spec.first_expert, block_m=tiles.gate_up.block_m
    )
    weights = topk_weights.contiguous()
    rows = Rows(order.expert_offsets, S)
    gather, a_scale = True, None
    if inputs is None:
        a = x
    elif spec.weight_on_input:  # it scales what is quantised
        slot = torch.where(rows.is_here, order.row_to_slot, 0).long()
        a = x[slot // K].float() * weights.float().flatten()[slot, None]
        a, a_scale = rows.quantize(a, inputs, scales.input, rows.here, x.dtype)
        gather = False
    elif scales.input is not None and scales.input.numel() > 1:  # experts scale a token differently
        index = torch.where(rows.is_here, order.row_to_slot // K, -1)
        a, a_scale = rows.quantize(x, inputs, scales.input, index, x.dtype)
        gather = False
    else:
        used = (order.slot_to_row >= 0).any(1)
        index = torch.where(used, torch.arange(T, device=x.device), -1)
        a, a_scale = rows.quantize(x, inputs, scales.input, index, x.dtype)
    hidden = quantized_gemm(
        x.new_empty(S, I, dtype=x.dtype if inputs is None else torch.float32),
        a, gate_up_proj.data, gate_up_proj.scale, order, tiles.gate_up,
        a_scale=a_scale, w_global_scale=gate_up_proj.global_scale, **_layout(gate_up_proj),
        bias=gate_up_bias, gather=gather,
        row_weight=weights if spec.weight_on_input and inputs is None else None,
        weight_on_input=True,
        activation=activation.name, gated=activation.gated, interleaved=spec.interleaved,
        alpha=activation.alpha, limit=activation.limit,
    )  # fmt: skip
    hidden_scale = None
    if inputs is not None:
        hidden, hidden_scale = rows.quantize(hidden, inputs, scales.hidden, rows.here, x.dtype)
    y = quantized_gemm(
        x.new_empty(S, H), hidden, down_proj.data, down_proj.scale, order, tiles.down,
        a_scale=hidden_scale, w_global_scale=down_proj.global_scale, **_layout(down_proj),
        bias=down_bias, row_weight=None if spec.weight_on_input else weights,
    )  # fmt: skip
    return combine(y, order.slot_to_row, x.new_empty(T, H) if out is None else out)


def quantized_grouped_gemm(
    a: Tensor,
    b: QuantizedTensor,
    expert_offsets: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    scheme: str,
    scale: Tensor | None,
) -> Tensor:
    """a (S, D) bf16 or fp32 -> (S, N); see `tmoe.dispatch.backend.Backend`."""
    S, (E, N, _) = a.shape[0], b.shape
    expert_offsets, inputs = expert_offsets.contiguous(), SCHEMES[scheme].inputs
    tile = choose_quantized_tiles(
        a.device, rows_per_expert=S / E, batch_invariant=current().batch_invariant
    ).down
    order = tile_rows(expert_offsets, S, block_m=tile.block_m)
    y = a.new_empty(S, N) if out is None else out
    a_scale = None
    if inputs is not None:
        rows = Rows(expert_offsets, S)
        a, a_scale = rows.quantize(a, inputs, scale, rows.here, a.dtype)
    quantized_gemm(
        y, a, b.data, b.scale, order, tile,
        a_scale=a_scale, w_global_scale=b.global_scale, **_layout(b), bias=bias,
    )  # fmt: skip
    return clear_tail(y, expert_offsets)


class Rows:
    """The rows in expert order; those past the last expert's hold what nobody wrote."""

    def __init__(self, expert_offsets: Tensor, num_rows: int) -> None:
        self.expert_offsets = expert_offsets
        self.number = torch.arange(
            num_rows, device=expert_offsets.device, dtype=expert_offsets.dtype
        )
        self.is_here = self.number < expert_offsets[-1]
        self.here = torch.where(self.is_here, self.number, -1)

    def quantize(
        self, x: Tensor, recipe: Recipe, scale: Tensor | None, index: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Rows x[index], 0 where that is -1, as a GEMM takes them: e4m3 codes and their scales, or
        numbers of `dtype` that the format can hold and, of NVFP4, the global scale.

        A static scale is one number or, if the rows are in expert order, (E,).
        """
        index, format = index.int(), recipe.format
        if scale is not None and scale.numel() == 1:
            scale = scale.reshape(())
        of_rows = None if scale is None or scale.ndim == 0 else self._of_rows(scale)
        if format.has_global_scale:
            offsets = None if of_rows is None else self.expert_offsets
            data, scales, g = quantize_nvfp4(
                x, global_scale=scale, row_index=index, expert_offsets=offsets
            )
            one = torch.ones((), device=x.device)
            values = dequantize_nvfp4(data, scales, one, dtype=dtype)
            return values, g.reshape(()) if of_rows is None else of_rows
        if format.scale is not FLOAT32:
            quantize = partial(quantize_mx, element=format.element.name)
            data, scales = quantize(x, scale_rule=recipe.scale_rule, row_index=index)
            return dequantize_mx(data, scales, element=format.element.name, dtype=dtype), None
        if of_rows is not None:
            return quantize_fp8(x, block="row", scale=of_rows, row_index=index)
        return quantize_fp8(x, block=block_of(recipe.block_shape), scale=scale, row_index=index)

    def _of_rows(self, of_experts: Tensor) -> Tensor:
        """(E,) -> (S,): each row has its expert's."""
        expert = torch.searchsorted(self.expert_offsets[1:], self.number, right=True)
        return of_experts.float()[expert.clamp(max=len(of_experts) - 1)]


def _layout(weight: QuantizedTensor) -> dict[str, int | bool]:
    """How far a scale reaches, as `quantized_gemm` is told."""
    rows, columns = weight.block_shape
    if weight.block_shape == (None, None) and weight.scale.ndim == 2:  # one for each half
        rows = weight.shape[1] // 2
    packed = FORMATS[weight.format].is_packed
    return {"packed": packed, "scale_rows": rows or 0, "scale_columns": columns or 0}
