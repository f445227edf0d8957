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
from ..dispatch.problem import ExpertsSpec, ExpertTensors, StaticScales
from ..formats import QuantizedTensor
from ..formats.scheme import SCHEMES
from .expert_arguments import facts_of, spec_of, tensors_of, weights_of
from .experts import fake_experts
from .operation import Facts, Operation
from .prepare import prepare_weights


def quantized_facts(*arguments: Any) -> Facts:
    scales, (scheme, format, _) = arguments[7:9], arguments[9:12]
    return facts_of(arguments[:7], spec_of(scheme, *arguments[12:]), format, scales)


def quantized_weights(*arguments: Any) -> ExpertWeights:
    tensors, spec, scales = _described(arguments)
    return weights_of(tensors, spec, *scales)


def _quantized(backend: Backend, *rest: Any) -> Tensor:
    *arguments, out = rest
    tensors, spec, scales = _described(arguments)
    return backend.fused_experts(tensors, spec, out, scales)


def _described(arguments: Any) -> tuple[ExpertTensors, ExpertsSpec, StaticScales]:
    *scales, scheme, format, block = arguments[7:12]
    spec = spec_of(scheme, *arguments[12:])
    return tensors_of(arguments[:7], format, block), spec, StaticScales(*scales)


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
