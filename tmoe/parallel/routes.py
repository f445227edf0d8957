"""Routes: from the experts that tokens chose to slots and the ranks that have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tmoe.kernels.exchange_ref import Slots

from .balance_replicas import replica_of
from .placement import Placement


@dataclass(frozen=True, slots=True)
class Tables:
    """A `Placement` as tensors on a device, int64."""

    slots: Tensor  # (E, R) the slots of each expert, R the most replicas; the rest repeats them
    replicas: Tensor  # (E,)
    ranks: Tensor  # (num_slots,) the rank of each slot


@lru_cache(maxsize=256)
def tables(placement: Placement, device: torch.device) -> Tables:
    """Made once; later calls copy nothing to the device."""
    most = max(map(len, placement.expert_slots))
    rows = [(slots * most)[:most] for slots in placement.expert_slots]
    counts = list(map(len, placement.expert_slots))

    def tensor(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Tables(tensor(rows), tensor(counts), tensor(placement.slot_ranks))


def slots_of(topk_ids: Tensor, placement: Placement, turn: Callable[[], Tensor]) -> Tensor:
    """(T, K) experts -> (T, K) slots; for -1 and ids that no expert has, what no slot has.

    Of an expert with replicas, each token takes one by its number, ``turn()[t]``, as
    `balance_replicas.replica_of` has it.
    """
    if placement.in_order:
        return topk_ids
    known = (topk_ids >= 0) & (topk_ids < placement.num_experts)
    ids = topk_ids.long().masked_fill(~known, 0)
    table = tables(placement, topk_ids.device)
    if not placement.has_replicas:
        slots = table.slots[:, 0][ids]
    else:
        slots = table.slots[ids, replica_of(turn()[:, None], ids, table.replicas[ids])]
    return slots.masked_fill(~known, -1).to(topk_ids.dtype)


def ranks_of(slots: Tensor, placement: Placement) -> Tensor:
    """The rank of each slot, int64; -1 of what is none."""
    known = (slots >= 0) & (slots < placement.num_slots)
    ranks = tables(placement, slots.device).ranks[slots.long().masked_fill(~known, 0)]
    return ranks.masked_fill(~known, -1)


@lru_cache(maxsize=256)
def slots_on(placement: Placement, device: torch.device) -> Slots:
    """A placement as the kernels read it; made once."""
    first = (*placement.first_slots, placement.num_slots)
    first_slots = torch.tensor(first, dtype=torch.int32, device=device)
    if placement.in_order:
        return Slots(first_slots, placement.num_experts)
    table = tables(placement, device)
    return Slots(
        first_slots, placement.num_experts, table.slots.int().contiguous(), table.replicas.int()
    )
