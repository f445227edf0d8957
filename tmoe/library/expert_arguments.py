"""What the ops of experts have among their arguments, in the dispatcher's words.

The first seven are the fields of `ExpertTensors`, and the last eight, with a scheme before them,
what `spec_of` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from ..activation import Activation
from ..dispatch import prepared
from ..dispatch.prepared import ExpertWeights
from ..dispatch.problem import ExpertsSpec, ExpertTensors, token_bucket
from .operation import Facts
from .weights import columns_of, weight_of


@cache  # every forward asks
def spec_of(
    scheme: str, activation: str, alpha: float, limit: float, interleaved: bool,
    weight_on_input: bool, first_expert: int, num_experts: int, wide: bool,
) -> ExpertsSpec:  # fmt: skip
    return ExpertsSpec(
        Activation(activation, alpha, limit), interleaved, weight_on_input, first_expert,
        num_experts, scheme or None, wide,
    )  # fmt: skip


def facts_of(
    tensors: Sequence[Any],
    spec: ExpertsSpec,
    format: str = "",
    scales: Sequence[Tensor | None] = (None, None),
    has_lora: bool = False,
    may_be_held: bool = True,
) -> Facts:
    """Of a call whose weights are lists: of one tensor, or of what `format` consists of. They may
    be held by backends in layouts of their own."""
    x, gate_up, down, _, topk_ids, gate_up_bias, down_bias = tensors
    (T, K), (local, H, I), num_experts = topk_ids.shape, down[0].shape, spec.num_experts
    holders: tuple[str, ...] = ()
    if may_be_held and not prepared.is_empty():
        rest = (gate_up_bias, down_bias, *scales)
        holders = prepared.backends_of(gate_up, down, rest, spec.activation, spec.interleaved)
    return Facts(
        "fused_experts",
        token_bucket(T),
        H,
        columns_of(down[0], format) if format else I,
        num_experts,
        K,
        x.dtype,
        activation=spec.activation,
        has_bias=gate_up_bias is not None or down_bias is not None,
        weight_on_input=spec.weight_on_input,
        scheme=spec.scheme,
        has_static_scales=scales[0] is not None and scales[1] is not None,
        has_lora=has_lora,
        window=None if local == num_experts else (spec.first_expert, local),
        wide=spec.wide,
        prepared=holders,
    )


def tensors_of(tensors: Sequence[Any], format: str, block: int) -> ExpertTensors:
    """Of a call whose weights are lists; without a format they aren't quantised."""
    x, gate_up, down, *rest = tensors
    if not format:
        return ExpertTensors(x, gate_up[0], down[0], *rest)
    weights = weight_of(gate_up, format, block, x), weight_of(down, format, block, x)
    return ExpertTensors(x, *weights, *rest)


def weights_of(tensors: ExpertTensors, spec: ExpertsSpec, *scales: Tensor | None) -> ExpertWeights:
    _, gate_up, down, _, _, *biases = tensors
    return ExpertWeights(gate_up, down, spec.activation, spec.interleaved, *biases, *scales)
