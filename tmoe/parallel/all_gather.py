"""All-gather + reduce-scatter: every rank sees all tokens and adds up what its experts say to them.

    x, weights, slots of each rank  ── all-gather ──►  of all ranks' tokens
    this rank's experts             ── partial sums (P·T, H) in float32
                                    ── reduce-scatter ──►  (T, H) of its own tokens

Where ranks have the same tokens already, nothing is gathered, and the sums are added up on all of
them. It sends each token everywhere, P·T·H, whatever its experts; few launches and no sorting. All
ranks have to bring the same number of rows: the most that one of them has, and rows without experts
on the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tmoe.kernels.exchange_ref import Parts

from . import autograd
from .autograd import wide
from .exchange_steps import place_tokens
from .groups import Pending
from .layout import Layout
from .local import LocalExperts, Rows, each_slot, in_order
from .messages import Tokens, as_bytes, send_rows
from .placement import Placement
from .routes import slots_on


class AllGather:
    """One call: `begin`, then `end`."""

    def __init__(
        self, layout: Layout, placement: Placement, rows: int, *, slot_by_slot: bool
    ) -> None:
        """`rows`: the most tokens that a rank has. `slot_by_slot`: add up as one rank does, slot
        by slot, bit by bit; costs K times the reduce-scatter."""
        self.layout, self.placement = layout, placement
        self.rows, self.slot_by_slot = rows, slot_by_slot

    def begin(self, x: Tensor, weights: Tensor, ids: Tensor) -> None:
        """x (T, H), weights (T, K) float32, ids (T, K): start sending them."""
        layout, missing = self.layout, self.rows - x.shape[0]
        self.count, self.tokens = x.shape[0], Tokens.of(x)
        slots = self._slots_of(ids)
        parts = Parts(
            autograd.copy_to_all(self.tokens.x, layout.copies),
            self.tokens.scale,
            slots,
            autograd.copy_to_all(weights, layout.copies),
        )
        if missing:
            parts = Parts(
                _more_rows(parts.x, missing, 0),
                None if parts.scale is None else _more_rows(parts.scale, missing, 0),
                _more_rows(slots, missing, -1),
                _more_rows(parts.weights, missing, 0),
            )
        owners = layout.owners
        self.pending: list[Pending] = []

        def send(part: Tensor, what: str) -> Tensor:
            self.pending.append(Pending(owners, f"gathering {what}"))
            return autograd.gather(part, owners, self.pending[-1])

        self.got = parts if owners.size == 1 else send_rows(parts, send)

    def end(self, experts: LocalExperts) -> Tensor:
        """(T, H) in float32: the sums over all experts."""
        layout, placement = self.layout, self.placement
        for pending in self.pending:
            pending.wait()
        rank, got = layout.experts.rank, self.got
        x = self.tokens.like(got.x, got.scale)
        rows = Rows(
            x,
            got.weights,
            got.slots,
            placement.first_slots[rank],
            placement.num_slots,
        )
        what, dtype = "adding up what experts say", wide(x.dtype)
        sums = each_slot(rows, experts, dtype) if self.slot_by_slot else experts(rows, dtype)
        sums = autograd.reduce_scatter(sums, layout.owners, what)
        sums = autograd.sum_over_all(sums, layout.copies, what)[: self.count]
        return in_order(sums) if self.slot_by_slot else sums

    def _slots_of(self, ids: Tensor) -> Tensor:
        """Before they are sent, while they are few. Of an expert with copies each token has its
        turn, and each rank begins with another one."""
        if self.placement.in_order:
            return ids
        slots, rank = slots_on(self.placement, ids.device), self.layout.owners.rank
        places = place_tokens(ids, slots, first_turn=rank, own=0, capacity=0, dropped=None)
        return places.slots


def _more_rows(part: Tensor, missing: int, value: int) -> Tensor:
    """With so many rows of `value` at the end; codes have none, so they get bytes of it."""
    if part.itemsize > 1:
        return torch.cat([part, part.new_full((missing, part.shape[1]), value)])
    rows = as_bytes(part)
    return torch.cat([rows, rows.new_full((missing, rows.shape[1]), value)]).view(part.dtype)
