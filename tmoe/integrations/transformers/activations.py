"""Which `Activation` an experts module of transformers computes, read off the module itself.

The config is no guide: several families compute a clamped SwiGLU under ``hidden_act="silu"``. The
truth is the module's ``_apply_gate`` (its ``act_fn`` if there is no gate), so a method that we
don't know by name is not fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import _default_apply_gate

from tmoe.activation import Activation

ActFn = Callable[[Tensor], Tensor]  # an nn.Module, or a plain function (LFM2)
ExpertsModule = Any  # an nn.Module with the attributes that transformers' decorator sets

# Elementwise activations by class name: classes moved between transformers' versions, names less
# so.
_ELEMENTWISE = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
    "LinearActivation": "identity",
    "Identity": "identity",
}
_GATED = {
    "silu": Activation("swiglu"),
    "gelu": Activation("geglu"),
    "gelu_tanh": Activation("geglu_tanh"),
}


def elementwise_name(act_fn: ActFn) -> str | None:
    """The name in `Activation` of an ``act_fn``, or None if we don't have it."""
    if act_fn is F.silu:
        return "silu"
    if isinstance(act_fn, nn.GELU):
        return "gelu_tanh" if act_fn.approximate == "tanh" else "gelu"
    return _ELEMENTWISE.get(type(act_fn).__name__)


def gated_by(act_fn: ActFn) -> Activation | None:
    """The activation ``act_fn(gate) · up``, or None if we don't have it."""
    return _GATED.get(elementwise_name(act_fn) or "")


def _clamped(act_fn: ActFn, limit: float) -> Activation | None:
    return Activation.swiglu(limit) if elementwise_name(act_fn) == "silu" else None


def _step(act_fn: ActFn, limit: float) -> Activation | None:
    if elementwise_name(act_fn) != "silu":
        return None
    return Activation.swiglu() if limit == math.inf else Activation.swiglu_step(limit)


# The classes of transformers that have a gate of their own, and what it computes.
_OWN_GATE: dict[str, Callable[[ExpertsModule], Activation | None]] = {
    "BeamExperts": lambda m: gated_by(m.act_fn),  # in fp32, as our kernels do for everyone
    "DeepseekV4Experts": lambda m: _clamped(m.act_fn, m.limit),
    "Glm5NextTextExperts": lambda m: Activation.swiglu(m.swiglu_limit),
    "GptOssExperts": lambda m: Activation.swiglu_oai(m.alpha, m.limit),
    "HYV4Experts": lambda m: Activation.swiglu(m.swiglu_limit),
    "HYV4VLExperts": lambda m: Activation.swiglu(m.swiglu_limit),
    "MiniMaxM3VLExperts": lambda m: Activation.swiglu_oai(m.swiglu_alpha, m.swiglu_limit),
    "OpenAIPrivacyFilterExperts": lambda m: Activation.swiglu_oai(m.alpha, m.limit),
    "Step3p7Experts": lambda m: _step(m.act_fn, m.limit),
}


def activation_of(experts: ExpertsModule) -> Activation | None:
    """The activation between the two projections, or None if only the module can compute it."""
    if not experts.has_gate:
        name = elementwise_name(experts.act_fn)
        return None if name is None else Activation(name)
    owner = owner_of_gate(type(experts))
    if owner == "default":
        # It splits in halves; a module that says "interleaved" and splits in halves is left alone.
        return gated_by(experts.act_fn) if experts.is_concatenated else None
    return _OWN_GATE[owner](experts) if owner in _OWN_GATE else None


@torch.compiler.assume_constant_result
def owner_of_gate(cls: type) -> str:
    """The class of transformers that defines the gate of `cls`, "default", or "" (someone else's).

    A function of the class alone, which torch.compile takes as a constant since it can't trace it.
    """
    gate: Any = cls._apply_gate  # type: ignore[attr-defined]
    if gate is _default_apply_gate:
        return "default"
    if not gate.__module__.startswith("transformers."):
        return ""
    return gate.__qualname__.removesuffix("._apply_gate")
