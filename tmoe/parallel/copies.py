"""Copies of an expert: each sees some of its tokens, and all get the whole gradient.

So copies that begin equal stay equal in training, with any optimizer that looks at its own
parameters alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import groups
from .autograd import wide
from .groups import Group
from .placement import Placement


@lru_cache(maxsize=256)
def copied(placement: Placement, rank: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """How many experts have copies; which of a rank's slots have one, and which expert of those."""
    several = [e for e, slots in enumerate(placement.expert_slots) if len(slots) > 1]
    held = placement.ranks[rank]
    mine = [(slot, several.index(e)) for slot, e in enumerate(held) if e in several]
    return len(several), tuple(slot for slot, _ in mine), tuple(at for _, at in mine)


class _SumOverCopies(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, placement: Placement, group: Group) -> Tensor:
        ctx.placement, ctx.group = placement, group
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor, None, None]:
        count, slots, at = copied(ctx.placement, ctx.group.rank)
        # A row for each expert with copies, in all of them: also a rank without any takes part.
        total = dw.new_zeros(count, *dw.shape[1:], dtype=wide(dw.dtype))
        here, there = (torch.tensor(where, device=dw.device) for where in (slots, at))
        if slots:
            total[there] = dw[here].to(total.dtype)
        groups.all_reduce(total, ctx.group, "the gradient of copies of experts")
        dw = dw.clone()
        if slots:
            dw[here] = total[there].to(dw.dtype)
        return dw, None, None


def sum_gradients(weight: Tensor, placement: Placement, group: Group) -> Tensor:
    """weight (slots of this rank, ...), as it is; the gradient of an expert with copies in `group`
    is the sum of theirs. A collective of the group, in the backward pass alone."""
    if not (placement.has_replicas and torch.is_grad_enabled() and weight.requires_grad):
        return weight
    return _SumOverCopies.apply(weight, placement, group)
