"""The routing of `route.py` in torch, in a file of its own: the torch backend needs no Triton."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES = {
    "logit": lambda x: x,
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
}


def route_ref(
    logits: Tensor,
    *,
    top_k: int,
    score: str = "logit",
    weight: str = "score",
    renormalize: bool = False,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    topk_ids: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    group_score: str = "top2",
    ruled_out: str = "never",
    num_shared: int = 0,
    logit_scale: float = 1.0,
    logit_softcap: float = 0.0,
    jitter: float = 0.0,
    scaling_factor: float = 1.0,
    epsilon: float = 0.0,
    min_sum: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same in torch; differentiable. fp64 logits are routed in fp64, all others in fp32."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    E = x.shape[-1] - num_shared
    any_finite = x[..., :E].isfinite().any(-1, keepdim=True)
    lowest = torch.finfo(x.dtype).min
    x = x.nan_to_num(nan=lowest)
    alive = x > lowest
    if logit_scale != 1:
        x = torch.where(alive, (x * logit_scale).clamp(lowest, -lowest), x)
    if logit_softcap:
        x = torch.where(alive, logit_softcap * torch.tanh(x / logit_softcap), x)
    x = x.masked_fill(~alive, lowest)  # no news in the forward; no NaN on the way back
    scores = SCORES[score](x[..., :E])

    if topk_ids is not None:
        ids = topk_ids.long()
        ids = torch.where((ids >= 0) & (ids < E), ids, -1)
    else:
        choice = scores if bias is None else (scores + bias).nan_to_num(nan=lowest)
        with torch.no_grad():
            if n_group > 1:
                kept = _in_kept_groups(choice, n_group, topk_group, group_score)
                choice = torch.where(kept, choice, 0.0 if ruled_out == "zero" else -torch.inf)
            ids = choice.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    if num_shared:
        shared = torch.arange(E, E + num_shared, device=ids.device).expand(*ids.shape[:-1], -1)
        ids = torch.cat([ids, shared], -1)

    at = ids.clamp(min=0)
    picked = x.gather(-1, at)
    weighs = any_finite & (ids >= 0) & alive.gather(-1, at)
    if weight == "score":
        s = SCORES[score](x).gather(-1, at) if num_shared else scores.gather(-1, at)
    elif weight == "sparsemixer":
        s = _sparsemixer(x, ids, jitter)
    else:
        s = SCORES[weight](picked.masked_fill(ids < 0, lowest))
    if renormalize:
        total = s.masked_fill(ids < 0, 0.0).sum(-1, keepdim=True) + epsilon
        total = total.clamp(min=min_sum)
        s = s / total.masked_fill(
            (ids < 0).all(-1, keepdim=True), 1.0
        )  # 0 / 0, on the way back too
    s = s * scaling_factor
    if expert_scale is not None:
        s = s * torch.where(ids < E, expert_scale.to(s.dtype)[at.clamp(max=E - 1)], 1.0)
    return torch.where(weighs, s, 0.0), ids.int()


def _in_kept_groups(choice: Tensor, n_group: int, topk_group: int, group_score: str) -> Tensor:
    """(T, E) bool: is the expert's group one of the `topk_group` best?"""
    best = choice.unflatten(-1, (n_group, -1)).sort(-1, descending=True).values
    score = best[..., 0] if group_score == "max" else best[..., :2].sum(-1)
    groups = score.argsort(dim=-1, descending=True, stable=True)[..., :topk_group]
    kept = torch.zeros_like(score, dtype=torch.bool).scatter(-1, groups, True)
    return kept.repeat_interleave(choice.shape[-1] // n_group, -1)


def _sparsemixer(x: Tensor, ids: Tensor, jitter: float) -> Tensor:
    """Each selected expert's share among those that were left and near it when it was selected."""
    weights, left = [], torch.ones_like(x, dtype=torch.bool)
    for taken in ids.long().split(1, -1):
        best = x.gather(-1, taken)
        near = left & ~((best - x) / torch.maximum(x.abs(), best) > 2 * jitter)
        weights.append(x.masked_fill(~near, -torch.inf).softmax(-1).gather(-1, taken))
        left = left.scatter(-1, taken, False)
    return torch.cat(weights, -1)


def softmax_ref(logits: Tensor) -> Tensor:
    """(T, E) -> the softmax that `route` writes to `probs`: a NaN or -inf logit has 0."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    return x.nan_to_num(nan=torch.finfo(x.dtype).min).softmax(-1)


def count_ref(ids: Tensor, num_experts: int) -> Tensor:
    """(T, K) -> (E,) int32: how many slots each expert got; other ids count for none."""
    ids = ids.long().flatten()
    in_range = (ids >= 0) & (ids < num_experts)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, torch.where(in_range, ids, 0), in_range.int())
