"""The MoE layers of well-known models; the demo and the benchmarks time these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MoEShape:
    """One MoE layer as one GPU holds it."""

    name: str
    num_experts: int  # E
    top_k: int  # K
    hidden: int  # H
    intermediate: int  # I


MODEL_SHAPES = (
    MoEShape("mixtral-8x7b", 8, 2, 4096, 14336),
    MoEShape("qwen3-30b-a3b", 128, 8, 2048, 768),
    MoEShape("deepseek-v3-ep8", 32, 8, 7168, 2048),  # 256 experts spread over 8 GPUs
    MoEShape("llama4-scout", 16, 1, 5120, 8192),
    MoEShape("gpt-oss-120b", 128, 4, 2880, 2880),
)


def random_weights(
    shape: MoEShape, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """gate_up_proj (E, 2I, H) and down_proj (E, H, I), scaled to keep the size of what they get."""
    E, H, I = shape.num_experts, shape.hidden, shape.intermediate
    gate_up_proj = _normal((E, 2 * I, H), H**-0.5, device, dtype)
    return gate_up_proj, _normal((E, H, I), I**-0.5, device, dtype)


def random_inputs(
    shape: MoEShape, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, H), topk_weights (T, K) in fp32, topk_ids (T, K): random tokens, random routes."""
    x = torch.randn(num_tokens, shape.hidden, device=device).to(dtype)
    logits = torch.randn(num_tokens, shape.num_experts, device=device)
    weights, ids = logits.softmax(-1).topk(shape.top_k)
    return x, weights / weights.sum(-1, keepdim=True), ids


def _normal(size: tuple[int, ...], std: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    # In the dtype itself: an fp32 copy of the largest layer would not fit beside it everywhere.
    return torch.empty(size, device=device, dtype=dtype).normal_(std=std)
