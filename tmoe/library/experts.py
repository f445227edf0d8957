"""torch.ops.tmoe.fused_experts, of weights that aren't quantised."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..dispatch import prepared
from ..dispatch.backend import Backend
from ..dispatch.prepared import ExpertWeights
from ..dispatch.problem import ExpertGradients, ExpertTensors, result_dtype
from .expert_arguments import facts_of, spec_of, weights_of
from .operation import Facts, Operation
from .prepare import prepare_weights
from .training import Training


def experts_facts(
    x: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, *words: Any,
) -> Facts:  # fmt: skip
    tensors = (x, (gate_up,), (down,), topk_weights, topk_ids, gate_up_bias, down_bias)
    return facts_of(tensors, spec_of("", *words))


def plain_weights(*arguments: Any) -> ExpertWeights:
    return weights_of(*_with_spec(arguments))


def _experts(backend: Backend, *rest: Any) -> Tensor:
    *arguments, out = rest
    y: Tensor = backend.fused_experts(*_with_spec(arguments, out))
    return y


def _with_spec(arguments: Any, *more: Any) -> Any:
    """The tensors, the rest as an `ExpertsSpec`, and `more`."""
    return ExpertTensors(*arguments[:7]), spec_of("", *arguments[7:]), *more


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
