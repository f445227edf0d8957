"""What an exchange hands to a rank's own experts, and what they give back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .messages import Tokens


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for the experts of one rank.

    Attributes:
        x: (R, H), any row stride; a `QuantizedTensor` where tokens were quantised before they were
            sent.
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


def each_slot(rows: Rows, experts: LocalExperts, dtype: torch.dtype) -> Tensor:
    """(R, K, H) in `dtype`: of each row, every slot for itself; 0 where its expert isn't here."""
    (R, K), H, x = rows.slots.shape, rows.x.shape[1], Tokens.of(rows.x)

    def for_each(part: Tensor) -> Tensor:
        return part.unsqueeze(1).expand(R, K, part.shape[1]).reshape(R * K, part.shape[1])

    alone = Rows(
        x.like(for_each(x.x), None if x.scale is None else for_each(x.scale)),
        rows.weights.reshape(R * K, 1),
        rows.slots.reshape(R * K, 1),
        rows.first,
        rows.num_slots,
    )
    return experts(alone, dtype).view(R, K, H)


def in_order(slots: Tensor) -> Tensor:
    """(T, K, H) -> (T, H): the sum over K, slot by slot, as one rank adds them up."""
    total = torch.zeros_like(slots[:, 0])
    for slot in slots.unbind(1):
        total = total + slot
    return total
