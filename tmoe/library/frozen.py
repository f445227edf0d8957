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
)
from .expert_arguments import facts_of, spec_of, tensors_of
from .experts import fake_experts
from .operation import Facts, Operation
from .training import Training


def _facts(*arguments: Any) -> Facts:
    adapters, scales, (scheme, format, _) = arguments[7:11], arguments[11:13], arguments[13:16]
    spec, has_lora = spec_of(scheme, *arguments[16:]), any(f is not None for f in adapters)
    return facts_of(arguments[:7], spec, format, scales, has_lora, may_be_held=False)


def _described(
    *arguments: Any,
) -> tuple[ExpertTensors, tuple[ExpertsSpec, StaticScales, Adapters]]:
    """What a backend's methods begin with."""
    adapters, scales, (scheme, format, block) = arguments[7:11], arguments[11:13], arguments[13:16]
    how = spec_of(scheme, *arguments[16:]), StaticScales(*scales), Adapters(*adapters)
    return tensors_of(arguments[:7], format, block), how


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
