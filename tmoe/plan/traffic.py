"""How many ranks, or nodes, a token is sent to.

A token draws K of E experts, all alike. Of a part with s of them none is drawn with the chance

    miss(E, s) = (E - s) (E - s - 1) ... / E (E - 1) ...        K factors each

With groups it first draws g of G, then K of the experts in these: a part inside a group is reached
only if the group is, and of a part with w whole groups j are drawn with the hypergeometric chance.
"""

from __future__ import annotations

import math


def chance_of_any(
    num_experts: int, top_k: int, here: float, n_group: int = 1, topk_group: int = 1
) -> float:
    """That at least one of a token's experts is among `here` neighbouring ones."""
    size = num_experts / n_group
    if n_group == 1 or topk_group == n_group:
        return 1 - _miss(num_experts, here, top_k)
    kept = topk_group * size
    if here <= size:
        return topk_group / n_group * (1 - _miss(kept, here, top_k))
    whole = here / size
    low = math.floor(whole)
    found = _of_groups(low, n_group, topk_group, size, top_k)
    if whole > low:  # between two numbers of groups
        more = _of_groups(low + 1, n_group, topk_group, size, top_k)
        found += (whole - low) * (more - found)
    return found


def _of_groups(whole: int, n_group: int, topk_group: int, size: float, top_k: int) -> float:
    total = math.comb(n_group, topk_group)
    found = 0.0
    for drawn in range(1, min(whole, topk_group) + 1):
        ways = math.comb(whole, drawn) * math.comb(n_group - whole, topk_group - drawn)
        found += ways / total * (1 - _miss(topk_group * size, drawn * size, top_k))
    return found


def _miss(total: float, here: float, top_k: int) -> float:
    chance = 1.0
    for place in range(top_k):
        chance *= max(0.0, total - here - place) / (total - place)
    return chance
