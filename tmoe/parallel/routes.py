"""Routes: a placement as tensors, from experts to slots and to the ranks that have them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tmoe.kernels.exchange_ref import Slots

from .placement import Placement


def ranks_of(slots: Tensor, placement: Placement) -> Tensor:
    """The rank of each slot, int64; -1 of what is none."""
    known = (slots >= 0) & (slots < placement.num_slots)
    ranks = _ranks(placement, slots.device)[slots.long().masked_fill(~known, 0)]
    return ranks.masked_fill(~known, -1)


@lru_cache(maxsize=256)
def _ranks(placement: Placement, device: torch.device) -> Tensor:
    """(num_slots,) the rank of each slot, int64; made once, later calls copy nothing there."""
    return torch.tensor(placement.slot_ranks, dtype=torch.int64, device=device)


@lru_cache(maxsize=256)
def slots_on(placement: Placement, device: torch.device) -> Slots:
    """A placement as the kernels read it; made once."""

    def tensor(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    first = tensor((*placement.first_slots, placement.num_slots))
    if placement.in_order:
        return Slots(first, placement.num_experts)
    most = max(map(len, placement.expert_slots))
    rows = [(slots * most)[:most] for slots in placement.expert_slots]  # the rest repeats them
    copies = [*map(len, placement.expert_slots)]
    return Slots(first, placement.num_experts, tensor(rows), tensor(copies))
