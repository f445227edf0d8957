"""The layers that the tests of this folder run: each is there for one reason."""

from __future__ import annotations

import torch

import tmoe

H, I = 32, 24

CASES = {
    "plain": dict(routing=(6, 2, "Renormalize")),
    "softmax-of-all": dict(routing=(5, 3, "Default")),
    "every-expert": dict(routing=(3, 3, "Renormalize")),
    "biases": dict(routing=(6, 2, "Renormalize"), bias=True, router_bias=True),
    "gpt-oss": dict(
        routing=(6, 2, "Renormalize"),
        activation="swiglu_oai", bias=True, router_bias=True, interleaved=True,
    ),
    "shared": dict(routing=(6, 2, "Default"), shared_intermediate_size=40),
    "gated-shared": dict(
        routing=(6, 2, "Default"), shared_intermediate_size=40, shared_expert_gate=True
    ),
    "ungated": dict(routing=(6, 2, "Default"), activation="relu2", shared_intermediate_size=40),
    "llama4": dict(routing=(6, 1, "Llama4"), shared_intermediate_size=40),
    "deepseek": dict(routing=(6, 2, "DeepSeekV3"), scaling=2.5, shared_intermediate_size=40),
}  # fmt: skip


def make_layer(name: str, *, scaling: float | None = None, **kwargs) -> tmoe.MoE:
    """The layer of case `name`; `scaling` overrides its scaling factor."""
    case = dict(CASES[name]) | kwargs
    default_scaling = case.pop("scaling", 1.0)
    num_experts, top_k, method = case.pop("routing")
    factor = default_scaling if scaling is None else scaling
    routing = tmoe.Routing(
        num_experts, top_k, method, **({} if factor == 1.0 else {"scaling_factor": factor})
    )
    layer = tmoe.MoE(H, I, routing, **case)
    if layer.gate.e_score_correction_bias is not None and kwargs.get("device") != "meta":
        with torch.no_grad():
            layer.gate.e_score_correction_bias.uniform_(-0.2, 0.2)
    return layer
