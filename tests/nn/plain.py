"""What `tmoe.MoE` must compute, in plain torch, differentiable, in any dtype.

It reads the layer's parameters and shares no code with it: routing and the shared expert are
written out here, the experts in `tests/reference.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import tmoe
from tests.reference import activation_ref, fused_experts_ref


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def plain_router(layer: tmoe.MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, ids) for the methods that these tests use. An fp32 router stays fp32."""
    routing = layer.routing
    K, method = routing.top_k, routing.method.name
    x = x.to(torch.promote_types(x.dtype, layer.gate.weight.dtype))
    logits = linear(x, layer.gate.weight, layer.gate.bias)
    logits = logits.to(torch.promote_types(x.dtype, torch.float32))
    if method == "Default":
        weights, ids = logits.softmax(-1).topk(K)
    elif method == "Renormalize":
        top, ids = logits.topk(K)
        weights = top.softmax(-1)
    elif method == "Llama4":
        top, ids = logits.topk(1)
        weights = top.sigmoid()
    else:
        assert method == "DeepSeekV3" and routing.n_group == 1
        scores = logits.sigmoid()
        ids = (scores + layer.gate.e_score_correction_bias.to(scores.dtype)).topk(K).indices
        weights = scores.gather(1, ids)
        weights = routing.scaling_factor * weights / weights.sum(-1, keepdim=True)
    return weights, ids


def plain_shared(layer: tmoe.MoE, x: Tensor) -> Tensor:
    """The shared expert's part of the output."""
    mlp, act = layer.shared_expert, layer.experts.activation
    up = linear(x, mlp.up_proj.weight)
    halves = (linear(x, mlp.gate_proj.weight), up) if act.gated else (up, None)
    shared = linear(activation_ref(*halves, act.name, act.alpha, act.limit), mlp.down_proj.weight)
    if layer.shared_expert_gate is not None:
        shared = shared * linear(x, layer.shared_expert_gate.weight).sigmoid()
    return shared


def plain_moe(layer: tmoe.MoE, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The layer's output, computed in `dtype`; gradients reach the layer's parameters."""
    tokens = x.to(dtype).reshape(-1, layer.hidden_size)
    weights, ids = plain_router(layer, tokens)
    experts, act = layer.experts, layer.experts.activation
    first = "gate_up_proj" if act.gated else "up_proj"
    y = fused_experts_ref(
        tokens, getattr(experts, first), experts.down_proj, weights, ids,
        activation=act.name, alpha=act.alpha, limit=act.limit,
        gate_up_bias=getattr(experts, f"{first}_bias"), down_bias=experts.down_proj_bias,
        interleaved=experts.interleaved, weight_on_input=layer.routing.weight_on_input, dtype=dtype,
    )  # fmt: skip
    if layer.shared_expert is not None:
        y = y + plain_shared(layer, tokens)
    return y.reshape(x.shape)
