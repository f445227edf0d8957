"""The MoE layers of well-known models, and random tensors for them: what is timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import expect
from .dispatch.known import model_layer


@dataclass(frozen=True, slots=True)
class MoEShape:
    """One MoE layer as one GPU holds it."""

    name: str
    num_experts: int  # E
    top_k: int  # K
    hidden: int  # H
    intermediate: int  # I


def layer_shape(model: str, *, tp: int = 1, ep: int = 1) -> MoEShape:
    """The layer of a model in `MODELS`, or what one of several GPUs holds of it: `tp` cut every
    expert into slices, `ep` divide the experts. Raises ``ValueError`` where that leaves a rest."""
    layer = model_layer(model)
    for name, ranks, what, size in (
        ("tp", tp, "intermediate", layer.intermediate),
        ("ep", ep, "num_experts", layer.num_experts),
    ):
        ok = ranks >= 1 and size % ranks == 0
        expect(ok, "layer_shape", name, f"a divisor of {what}={size}", ranks)
    suffix = "".join(f"-{name}{n}" for name, n in (("tp", tp), ("ep", ep)) if n > 1)
    return MoEShape(
        model + suffix, layer.num_experts // ep, layer.top_k, layer.hidden, layer.intermediate // tp
    )


MODEL_SHAPES = (
    layer_shape("mixtral-8x7b"),
    layer_shape("qwen3-30b-a3b"),
    layer_shape("deepseek-v3", ep=8),  # 256 experts spread over 8 GPUs
    layer_shape("llama4-scout"),
    layer_shape("gpt-oss-120b"),
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
