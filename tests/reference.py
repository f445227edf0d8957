"""The experts, one (token, slot) pair at a time: slow, short and hard to get wrong.

Tests compare with this. It shares no structure with any backend: no sort, no grouping, no rows.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.bench.reference import (
    quantized,
    quantized_experts_ref,
    rounded,
    some_quantized_tokens_ref,
)

__all__ = [
    "activation_ref",
    "fused_experts_ref",
    "grouped_gemm_ref",
    "quantized",
    "quantized_experts_ref",
    "rounded",
    "some_quantized_tokens_ref",
]


def activation_ref(
    gate: Tensor, up: Tensor | None, name: str, alpha: float, limit: float
) -> Tensor:
    """Written from the models' formulas, with min and max where the library clamps."""
    top = gate.new_tensor(limit)
    if up is not None and limit < math.inf:
        up = torch.maximum(torch.minimum(up, top), -top)
    if name == "swiglu":
        gate = torch.minimum(gate, top)
        return gate / (1 + torch.exp(-gate)) * up
    if name == "swiglu_oai":
        gate = torch.minimum(gate, top)
        return gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
    if name == "swiglu_step":
        return torch.minimum(gate / (1 + torch.exp(-gate)), top) * up
    if name in ("geglu", "gelu"):
        gate = gate * (1 + torch.erf(gate / math.sqrt(2))) / 2
    elif name in ("geglu_tanh", "gelu_tanh"):
        gate = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    elif name == "silu":
        gate = gate / (1 + torch.exp(-gate))
    elif name == "relu2":
        gate = torch.where(gate > 0, gate, 0.0) ** 2
    return gate if up is None else gate * up


def fused_experts_ref(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "swiglu",
    alpha: float = 1.0,
    limit: float = math.inf,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    interleaved: bool = False,
    weight_on_input: bool = False,
    first_expert: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """(T, H) in `dtype`, differentiable: what `tmoe.fused_experts` must return."""
    gated = gate_up_proj.shape[1] != down_proj.shape[2]
    out = []
    for t in range(x.shape[0]):
        total = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
        for k in range(topk_ids.shape[1]):
            e = int(topk_ids[t, k]) - first_expert
            if not 0 <= e < gate_up_proj.shape[0]:
                continue
            weight = topk_weights[t, k].to(dtype)
            row = x[t].to(dtype)
            if weight_on_input:
                row = weight * row
            hidden = F.linear(row, gate_up_proj[e].to(dtype))
            if gate_up_bias is not None:
                hidden = hidden + gate_up_bias[e].to(dtype)
            gate, up = hidden, None
            if gated:
                half = hidden.shape[0] // 2
                gate, up = (
                    (hidden[::2], hidden[1::2]) if interleaved else (hidden[:half], hidden[half:])
                )
            row = F.linear(
                activation_ref(gate, up, activation, alpha, limit), down_proj[e].to(dtype)
            )
            if down_bias is not None:
                row = row + down_bias[e].to(dtype)
            total = total + (row if weight_on_input else weight * row)
        out.append(total)
    return torch.stack(out) if out else x.to(dtype)


def grouped_gemm_ref(
    a: Tensor,
    b: Tensor,
    expert_offsets: Tensor,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """(S, N) in `dtype`, row by row; rows past the last offset are 0."""
    out = []
    for s in range(a.shape[0]):
        owners = [e for e in range(b.shape[0]) if expert_offsets[e] <= s < expert_offsets[e + 1]]
        if not owners:
            out.append(torch.zeros(b.shape[1], dtype=dtype, device=a.device))
            continue
        row = b[owners[0]].to(dtype) @ a[s].to(dtype)
        out.append(row if bias is None else row + bias[owners[0]].to(dtype))
    return torch.stack(out) if out else torch.zeros(0, b.shape[1], dtype=dtype, device=a.device)
