"""The routing of `route.py` in torch, in a file of its own: the torch backend needs no Triton."""

from __future__ import annotations

import torch
from torch import Tensor


def route_ref(
    logits: Tensor,
    *,
    top_k: int,
    score: str,
    normalise: str,
    bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scaling_factor: float = 1.0,
    epsilon: float = 0.0,
    min_sum: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same in torch; differentiable. fp64 logits are routed in fp64, all others in fp32."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    any_finite = x.isfinite().any(-1, keepdim=True)
    lowest = torch.finfo(x.dtype).min
    x = x.nan_to_num(nan=lowest)
    functions = {"none": lambda s: s, "softmax": lambda s: s.softmax(-1), "sigmoid": torch.sigmoid}
    scores = functions[score](x)
    choice = scores if bias is None else (scores + bias).nan_to_num(nan=lowest)
    order = choice.argsort(dim=-1, descending=True, stable=True)
    if n_group > 1:
        two_best = choice.unflatten(-1, (n_group, -1)).sort(-1, descending=True).values[..., :2]
        group_order = two_best.sum(-1).argsort(dim=-1, descending=True, stable=True)
        left_out = torch.ones_like(group_order).scatter(-1, group_order[..., :topk_group], 0)
        left_out = left_out.repeat_interleave(x.shape[-1] // n_group, -1).gather(-1, order)
        order = order.gather(-1, left_out.argsort(dim=-1, stable=True))
    ids = order[..., :top_k]
    picked = scores.gather(-1, ids)
    if normalise == "sum":
        weights = picked / (picked.sum(-1, keepdim=True) + epsilon).clamp(min=min_sum)
    else:
        weights = functions[normalise](picked)
    weighs = any_finite & (x.gather(-1, ids) > lowest)
    return torch.where(weighs, weights * scaling_factor, 0.0), ids.int()
