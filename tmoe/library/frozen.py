"""torch.ops.tmoe.frozen_experts: experts whose weights are frozen, perhaps with adapters on them.

The weights are plain or quantised: a list of one tensor, or of codes, scales and perhaps a global
scale. Nothing is computed for them in the backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..dispatch.backend import Backend
from ..dispatch.problem import (
    Adapters,
    ExpertsSpec,
    ExpertTensors,
    FrozenGradients,
    StaticScales,
    token_bucket,
)
from .experts import activation_of, fake_experts
from .operation import Facts, Operation
from .training import Training
from .weights import columns_of, weight_of


def _facts(*arguments: Any) -> Facts:
    x, gate_up, down, _, topk_ids, gate_up_bias, down_bias, *rest = arguments
    *adapters, input_scale, hidden_scale, scheme, format, _ = rest[:9]
    spec = rest[9:]
    name, alpha, limit, _, weight_on_input, first, num_experts, wide = spec
    (T, K), (local, H, _) = topk_ids.shape, down[0].shape
    return Facts(
        "fused_experts",
        token_bucket(T),
        H,
        columns_of(down[0], format),
        num_experts,
        K,
        x.dtype,
        activation=activation_of(name, alpha, limit),
        has_bias=gate_up_bias is not None or down_bias is not None,
        weight_on_input=weight_on_input,
        scheme=scheme or None,
        has_static_scales=input_scale is not None and hidden_scale is not None,
        wide=wide,
        has_lora=any(factor is not None for factor in adapters),
        window=None if local == num_experts else (first, local),
    )


def _described(
    *arguments: Any,
) -> tuple[ExpertTensors, tuple[ExpertsSpec, StaticScales, Adapters]]:
    """What a backend's methods begin with."""
    x, gate_up, down, topk_weights, topk_ids, gate_up_bias, down_bias, *rest = arguments
    *adapters, input_scale, hidden_scale, scheme, format, block, name, alpha, limit = rest[:12]
    interleaved, weight_on_input, first_expert, num_experts, wide = rest[12:]
    activation = activation_of(name, alpha, limit)
    spec = ExpertsSpec(
        activation, interleaved, weight_on_input, first_expert, num_experts, scheme or None, wide
    )
    weights = gate_up[0], down[0]
    if scheme:
        weights = weight_of(gate_up, format, block, x), weight_of(down, format, block, x)
    tensors = ExpertTensors(x, *weights, topk_weights, topk_ids, gate_up_bias, down_bias)
    return tensors, (spec, StaticScales(input_scale, hidden_scale), Adapters(*adapters))


def _compute(backend: Backend, *rest: Any) -> Tensor:
    *arguments, out = rest
    tensors, (spec, scales, adapters) = _described(*arguments)
    given = {"adapters": adapters} if any(f is not None for f in adapters) else {}
    y: Tensor = backend.fused_experts(tensors, spec, out, scales, **given)
    return y


def _train(backend: Backend, *arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, how = _described(*arguments)
    return backend.train_frozen(tensors, *how)


def _backward(backend: Backend, grad: Tensor, *rest: Any) -> list[Tensor]:
    *arguments, kept, wanted, may_write, _ = rest
    tensors, how = _described(*arguments)
    known = kept if kept.numel() else None
    found = backend.frozen_backward(grad, tensors, *how, known, FrozenGradients(*wanted), may_write)
    return [gradient for gradient in found if gradient is not None]


def _fake_kept(x: Tensor, gate_up: list[Tensor], *rest: Any) -> Tensor:
    topk_ids = rest[2]
    return x.new_empty(topk_ids.shape[0] * topk_ids.shape[1], gate_up[0].shape[1])


_FROZEN = Operation(
    "frozen_experts",
    "Tensor x, Tensor[] gate_up, Tensor[] down, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? gate_up_bias, Tensor? down_bias, Tensor? gate_up_a, Tensor? gate_up_b, "
    "Tensor? down_a, Tensor? down_b, Tensor? input_scale, Tensor? hidden_scale, "
    "str scheme, str weight_format, int weight_block, str activation, float alpha, float limit, "
    "bool interleaved, bool weight_on_input, int first_expert, int num_experts, bool wide",
    "Tensor",
    facts=_facts,
    compute=_compute,
    fake=fake_experts,
    differentiable=(0, 3, 5, 6, 7, 8, 9, 10),
).define(has_out=False, has_backward=False)
Training(_FROZEN, _backward, (), _train, _fake_kept).define()
