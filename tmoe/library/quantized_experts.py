"""torch.ops.tmoe.quantized_experts, of quantised weights, and coded_experts, of an input that is
quantised already."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import prepared
from ..dispatch.backend import Backend
from ..dispatch.prepared import ExpertWeights
from ..dispatch.problem import ExpertsSpec, ExpertTensors, StaticScales, token_bucket
from ..formats import QuantizedTensor
from ..formats.scheme import SCHEMES
from .experts import activation_of, fake_experts
from .operation import Facts, Operation
from .prepare import prepare_weights
from .weights import columns_of, weight_of


def quantized_facts(*arguments: Any) -> Facts:
    x, gate_up, down, _, topk_ids, gate_up_bias, down_bias, *rest = arguments
    input_scale, hidden_scale, scheme, format, _, name, alpha, limit, interleaved, *rest = rest
    weight_on_input, first, num_experts, wide = rest
    (T, K), (local, H, _) = topk_ids.shape, down[0].shape
    activation = activation_of(name, alpha, limit)
    return Facts(
        "fused_experts",
        token_bucket(T),
        H,
        columns_of(down[0], format),
        num_experts,
        K,
        x.dtype,
        activation=activation,
        has_bias=gate_up_bias is not None or down_bias is not None,
        weight_on_input=weight_on_input,
        scheme=scheme,
        has_static_scales=input_scale is not None and hidden_scale is not None,
        window=None if local == num_experts else (first, local),
        wide=wide,
        prepared=()
        if prepared.is_empty()
        else prepared.backends_of(
            gate_up,
            down,
            (gate_up_bias, down_bias, input_scale, hidden_scale),
            activation,
            interleaved,
        ),
    )


def quantized_weights(*arguments: Any) -> ExpertWeights:
    x, gate_up, down, _, _, gate_up_bias, down_bias, input_scale, hidden_scale, *rest = arguments
    _, format, block, name, alpha, limit, interleaved, *_ = rest
    return ExpertWeights(
        weight_of(gate_up, format, block, x),
        weight_of(down, format, block, x),
        activation_of(name, alpha, limit),
        interleaved,
        gate_up_bias,
        down_bias,
        input_scale,
        hidden_scale,
    )


def _quantized(backend: Backend, *arguments: Any) -> Tensor:
    x, gate_up, down, topk_weights, topk_ids, gate_up_bias, down_bias, *rest = arguments
    input_scale, hidden_scale, scheme, format, block, name, alpha, limit, *rest = rest
    interleaved, weight_on_input, first_expert, num_experts, wide, out = rest
    activation = activation_of(name, alpha, limit)
    spec = ExpertsSpec(
        activation, interleaved, weight_on_input, first_expert, num_experts, scheme, wide
    )
    tensors = ExpertTensors(
        x,
        weight_of(gate_up, format, block, x),
        weight_of(down, format, block, x),
        topk_weights,
        topk_ids,
        gate_up_bias,
        down_bias,
    )
    return backend.fused_experts(tensors, spec, out, StaticScales(input_scale, hidden_scale))


_QUANTIZED = (
    "Tensor[] gate_up, Tensor[] down, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? gate_up_bias, Tensor? down_bias, Tensor? input_scale, Tensor? hidden_scale, "
    "str scheme, str weight_format, int weight_block, str activation, float alpha, float limit, "
    "bool interleaved, bool weight_on_input, int first_expert, int num_experts, bool wide"
)

Operation(
    "quantized_experts",
    "Tensor x, " + _QUANTIZED,
    "Tensor",
    facts=quantized_facts,
    compute=_quantized,
    fake=fake_experts,
    differentiable=(0, 3, 5, 6),  # no backend has their gradients; asking for them is refused
    prepare=partial(prepare_weights, quantized_weights, _quantized),
    release=lambda backend, *arguments: prepared.keep_only(backend, quantized_weights(*arguments)),
).define()


# coded_experts ------------------------------------------------------------------------------------


def _coded(
    x: Tensor, scales: list[Tensor], dtype: torch.dtype, gate_up: list[Tensor], down: list[Tensor],
    *rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of quantized_experts, with a quantised x."""
    recipe = SCHEMES[rest[6]].inputs
    assert recipe is not None, "a scheme that quantises its inputs"
    shape = (x.shape[0], down[0].shape[1])
    scale, *more = scales
    q = QuantizedTensor(
        x, scale, more[0] if more else None, recipe.format.name, recipe.block_shape, shape, dtype
    )
    return q, gate_up, down, *rest


def _fake_coded(*arguments: Any) -> Tensor:
    x, _, dtype, _, down, *_, wide, _ = arguments
    result = torch.promote_types(dtype, torch.float32) if wide else dtype
    return x.new_empty((x.shape[0], down[0].shape[1]), dtype=result)


Operation(
    "coded_experts",
    "Tensor x, Tensor[] x_scales, ScalarType x_dtype, " + _QUANTIZED,
    "Tensor",
    facts=lambda *arguments: quantized_facts(*_coded(*arguments))._replace(coded=True),
    compute=lambda backend, *rest: _quantized(backend, *_coded(*rest[:-1]), rest[-1]),
    fake=_fake_coded,
    differentiable=(5, 7, 8),  # as of quantized_experts
).define(has_out=False)
