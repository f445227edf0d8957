"""How many ranks, or nodes, a token is sent to.

A token draws K of E experts, all alike. Of a part with s of them none is drawn with the chance

    (E - s) (E - s - 1) ... / E (E - 1) ...        K factors each

Where the router first chooses groups (DeepSeek's node-limited routing), which ones depends on the
scores of their best experts, and there is no such formula: tokens with random scores are sent
through the router itself, always the same ones.
"""

from __future__ import annotations

from functools import cache

import torch

import tmoe

TOKENS = 4096  # the chance is known within 1 %, or so


def chance_of_any(
    num_experts: int, top_k: int, parts: int, n_group: int = 1, topk_group: int = 1
) -> float:
    """That at least one of a token's experts is in a part, where neighbouring experts are divided
    into `parts` equal ones; the mean over parts if they can't be quite equal."""
    if n_group == 1 or topk_group == n_group:
        here, missed = num_experts / parts, 1.0
        for place in range(top_k):
            missed *= max(0.0, num_experts - here - place) / (num_experts - place)
        return 1 - missed
    ids = _drawn(num_experts, top_k, n_group, topk_group)
    reached = torch.zeros(len(ids), parts).scatter_(1, ids * parts // num_experts, 1.0)
    return reached.mean().item()


@cache
def _drawn(num_experts: int, top_k: int, n_group: int, topk_group: int) -> torch.Tensor:
    routing = tmoe.Routing(num_experts, top_k, "DeepSeekV3", n_group=n_group, topk_group=topk_group)
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, num_experts, generator=random)
    with tmoe.options(backend="torch"):
        return tmoe.route(logits, routing)[1].long()
