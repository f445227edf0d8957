"""What an exchange hands to a rank's own experts, and what they give back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .autograd import wide


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for the experts of one rank.

    Attributes:
        x: (R, H), any row stride.
        weights: (R, K) float32.
        slots: (R, K) integers; of those outside the window nothing is computed.
        first: the slot of this rank's first expert.
        num_slots: what `slots` count up to, and what tells the average load: R·K / num_slots rows
            for each expert.
    """

    x: Tensor
    weights: Tensor
    slots: Tensor
    first: int
    num_slots: int


# Rows and the dtype of the result -> (R, H) in it: the rank's partial sum of each row.
LocalExperts = Callable[[Rows, torch.dtype], Tensor]


def partial_sums(rows: Rows, experts: LocalExperts) -> Tensor:
    """(R, H) in float32: of each row, the sum over its experts here."""
    return experts(rows, wide(rows.x.dtype))


def each_slot(rows: Rows, experts: LocalExperts) -> Tensor:
    """(R, K, H) in float32: of each row, every slot for itself; 0 where its expert isn't here."""
    (R, K), H = rows.slots.shape, rows.x.shape[1]
    alone = Rows(
        rows.x.unsqueeze(1).expand(R, K, H).reshape(R * K, H),
        rows.weights.reshape(R * K, 1),
        rows.slots.reshape(R * K, 1),
        rows.first,
        rows.num_slots,
    )
    return experts(alone, wide(rows.x.dtype)).view(R, K, H)


def in_order(slots: Tensor) -> Tensor:
    """(T, K, H) -> (T, H): the sum over K, slot by slot, as one rank adds them up."""
    total = torch.zeros_like(slots[:, 0])
    for slot in slots.unbind(1):
        total = total + slot
    return total
