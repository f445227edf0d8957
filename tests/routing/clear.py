"""Which rows of logits leave no doubt about the experts, in fp32 or another precision.

Routers break ties in different ways, and two roundings of one formula make ties of their own. A row
is clear if whatever decides is further apart, in fp64, than the rounding of both sides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tmoe.kernels.route_ref import SCORES
from tmoe.routing import Routing

# Of a score, relative to it. exp(x - max) of logits 100 apart is off by 64 roundings of fp32.
ERROR_FP32 = 2.0**-18
ERROR_BF16 = 2.0**-8


def clear_rows(
    logits: Tensor, bias: Tensor | None, routing: Routing, error: float = ERROR_FP32
) -> Tensor:
    """(T,) bool: is the choice of a row clear, where a score has a relative error of `error`?"""
    rule, E, G = routing.rule, routing.num_experts, routing.n_group
    x = rule.logit_scale * logits.double()
    if rule.logit_softcap:
        x = rule.logit_softcap * torch.tanh(x / rule.logit_softcap)
    scores = SCORES[rule.score](x[:, :E])
    choice = scores if bias is None else scores + bias.double()
    doubt = error * scores.abs() + 2.0**-120
    if bias is not None:
        doubt = doubt + 4 * 2.0**-24 * choice.abs()  # the sum is fp32 in every model
    clear = torch.ones(len(x), dtype=torch.bool)
    if G > 1:
        best, which = choice.view(-1, G, E // G).sort(-1, descending=True)
        doubts = doubt.view(-1, G, E // G).gather(-1, which)
        n = 1 if rule.group_score == "max" else 2
        clear &= _apart(best[..., :n].sum(-1), doubts[..., :n].sum(-1), routing.topk_group)
        groups = best[..., :n].sum(-1).argsort(-1, descending=True)[:, : routing.topk_group]
        kept = torch.zeros(len(x), G, dtype=torch.bool).scatter(1, groups, True)
        kept = kept.repeat_interleave(E // G, 1)
        choice = torch.where(kept, choice, 0.0 if rule.ruled_out == "zero" else -torch.inf)
    for k in range(routing.top_k):
        clear &= _apart(choice, doubt, k + 1)
    if rule.weight == "sparsemixer":
        for k in range(routing.top_k):  # nor may it be in doubt which others are near
            best = x.sort(-1, descending=True).values[:, k, None]
            distance = (best - x) / torch.maximum(x.abs(), best)
            clear &= ((distance - 2 * rule.jitter).abs() > error).all(-1)
    return clear


def _apart(choice: Tensor, doubt: Tensor, k: int) -> Tensor:
    """(T,) bool: are the k-th and the next choice of a row further apart than their doubts?"""
    if k >= choice.shape[-1]:
        return torch.ones(len(choice), dtype=torch.bool)
    choice, order = choice.sort(-1, descending=True)
    doubt = doubt.gather(-1, order)
    return ~(choice[:, k - 1] - choice[:, k] <= doubt[:, k - 1] + doubt[:, k])
