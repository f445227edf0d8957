"""torch.ops.tmoe.fused_experts, of weights that aren't quantised."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor

from ..activation import Activation
from ..dispatch import prepared
from ..dispatch.backend import Backend
from ..dispatch.prepared import ExpertWeights
from ..dispatch.problem import (
    ExpertGradients,
    ExpertsSpec,
    ExpertTensors,
    result_dtype,
    token_bucket,
)
from .operation import Facts, Operation
from .prepare import prepare_weights
from .training import Training

activation_of = cache(Activation)


def experts_facts(*arguments: Any) -> Facts:
    x, gate_up, down_proj, _, topk_ids, gate_up_bias, down_bias, *rest = arguments
    name, alpha, limit, interleaved, weight_on_input, first, num_experts, wide = rest
    activation = activation_of(name, alpha, limit)
    (T, K), (local, H, I) = topk_ids.shape, down_proj.shape
    return Facts(
        "fused_experts",
        token_bucket(T),
        H,
        I,
        num_experts,
        K,
        x.dtype,
        activation=activation,
        has_bias=gate_up_bias is not None or down_bias is not None,
        weight_on_input=weight_on_input,
        window=None if local == num_experts else (first, local),
        wide=wide,
        prepared=()
        if prepared.is_empty()
        else prepared.backends_of(
            (gate_up,), (down_proj,), (gate_up_bias, down_bias), activation, interleaved
        ),
    )


def plain_weights(*arguments: Any) -> ExpertWeights:
    _, gate_up, down, _, _, gate_up_bias, down_bias, name, alpha, limit, interleaved, *_ = arguments
    activation = activation_of(name, alpha, limit)
    return ExpertWeights(gate_up, down, activation, interleaved, gate_up_bias, down_bias)


def _experts(backend: Backend, *rest: Any) -> Tensor:
    *arguments, out = rest
    y: Tensor = backend.fused_experts(*_with_spec(arguments, out))
    return y


def _with_spec(arguments: Any, *more: Any) -> Any:
    """The tensors, the rest as an `ExpertsSpec`, and `more`."""
    *tensors, name, alpha, limit, interleaved, weight_on_input, first, num_experts, wide = arguments
    activation = activation_of(name, alpha, limit)
    spec = ExpertsSpec(activation, interleaved, weight_on_input, first, num_experts, wide=wide)
    return ExpertTensors(*tensors), spec, *more


def fake_experts(x: Tensor, *rest: Any) -> Tensor:
    *_, wide, _ = rest
    return x.new_empty(x.shape, dtype=result_dtype(x, wide))


def _train_experts(backend: Backend, *arguments: Any) -> tuple[Tensor, Tensor]:
    return backend.train_experts(*_with_spec(arguments))


def _experts_backward(backend: Backend, grad: Tensor, *rest: Any) -> list[Tensor]:
    *arguments, kept, wanted, may_write, sums = rest
    kept = kept if kept.numel() else None
    more = (kept, ExpertGradients(*wanted), may_write, ExpertGradients(*sums))
    gradients = backend.experts_backward(grad, *_with_spec(arguments, *more))
    return [gradient for gradient in gradients if gradient is not None]


def _fake_kept(x: Tensor, gate_up_proj: Tensor, *rest: Any) -> Tensor:
    T, K = rest[2].shape
    return x.new_empty(T * K, gate_up_proj.shape[1])


_EXPERTS = Operation(
    "fused_experts",
    "Tensor x, Tensor gate_up_proj, Tensor down_proj, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? gate_up_bias, Tensor? down_bias, str activation, float alpha, float limit, "
    "bool interleaved, bool weight_on_input, int first_expert, int num_experts, bool wide",
    "Tensor",
    facts=experts_facts,
    compute=_experts,
    fake=fake_experts,
    differentiable=(0, 1, 2, 3, 5, 6),
    prepare=partial(prepare_weights, plain_weights, _experts),
    release=lambda backend, *arguments: prepared.keep_only(backend, plain_weights(*arguments)),
).define(has_backward=False)
Training(_EXPERTS, _experts_backward, (1, 2), _train_experts, _fake_kept).define()
