"""What the recipes share: codes, scales and global scales of a layer, in `Layer`'s order."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ...checks import expect
from ...dispatch.prepared import ExpertWeights
from ...formats import FORMATS, QuantizedTensor
from ...formats.compute import quantize_parts
from ...formats.recipe import Recipe
from .layer import Layer, Rule, Sizes
from .layouts import up_gate

Maybe = Tensor | None
FP8_BLOCK = (("fp8_block",), ("swiglu",), (128, None), (128, 128))  # of a `Rule`, for both makers


@dataclass(frozen=True, slots=True)
class Prepared:
    """Weights for one entry point, in new memory. I and H below are the padded sizes."""

    sizes: Sizes

    def keywords(self) -> dict[str, Any]:
        """All but `sizes`, by the entry point's keywords; an enum is its member's name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sizes"}


def quantized(experts: ExpertWeights) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Both projections, where `Layer.of` has made sure that they are quantised."""
    w13, w2 = experts.gate_up_proj, experts.down_proj
    assert isinstance(w13, QuantizedTensor) and isinstance(w2, QuantizedTensor)
    return w13, w2


def codes(layer: Layer, view: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Codes or plain values of both projections in `Layer`'s order."""
    w13, w2 = layer.experts.gate_up_proj, layer.experts.down_proj
    packed = layer.format in FORMATS and FORMATS[layer.format].is_packed
    w13 = layer.fc1(w13.data if isinstance(w13, QuantizedTensor) else w13.detach(), 1 + packed)
    w2 = layer.fc2(w2.data if isinstance(w2, QuantizedTensor) else w2.detach(), 1 + packed)
    return (w13, w2) if view is None else (w13.view(view), w2.view(view))


def block_scales(layer: Layer) -> tuple[Tensor, Tensor, int]:
    """Scales of 1×block in `Layer`'s order, as bytes, and the block's size."""
    w13, w2 = quantized(layer.experts)
    size = w13.block_shape[1]
    assert size is not None
    return layer.fc1(w13.scale, size), layer.fc2(w2.scale, size), size


def fp8_block(rule: Rule, experts: ExpertWeights) -> tuple[Layer, Tensor, Tensor]:
    """The layer and its scales, up first."""
    layer = Layer.of(rule, experts)
    w13, w2 = quantized(experts)
    return layer, up_gate(w13.scale), w2.scale.clone()


def one_scale_per_expert(q: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Codes and (E,) scales of fp8_tensor weights. Under the larger scale of an expert, the other
    half's codes are rounded a second time; its own come back as they were."""
    if q.scale.ndim == 1:
        return q.data, q.scale
    data, scale = q.data.clone(), q.scale.amax(dim=-1)
    for e in (q.scale != scale[:, None]).any(dim=-1).nonzero().flatten().tolist():
        data[e] = quantize_parts(q[e].dequantize(), Recipe.held_by(q), scale[e], None)[0]
    return data, scale


def global_scales(layer: Layer) -> tuple[Tensor, Tensor]:
    """(E,) of both projections; NVFP4's codes can't be brought under another one without loss."""
    scales = []
    for arg, q in zip(("gate_up_proj", "down_proj"), quantized(layer.experts), strict=True):
        scale = q.global_scale
        assert scale is not None
        if scale.ndim == 2:
            wanted = "of one global scale per expert, the same for both halves of its rows"
            expect(bool((scale[:, 0] == scale[:, 1]).all()), layer.op, arg, wanted, scale.tolist())
            scale = scale[:, 0]
        scales.append(scale.float())
    return scales[0], scales[1]


def input_scales(layer: Layer, *, per_expert: bool = False) -> tuple[Tensor, Tensor]:
    """a1, and a2, which may always be per expert."""
    a1 = layer.static_scale("input_scale", per_expert=per_expert)
    return a1, layer.static_scale("hidden_scale", per_expert=True)
