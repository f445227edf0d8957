"""All-gather + reduce-scatter: every rank sees all tokens and adds up what its experts say to them.

    x, weights, ids of each rank  ── all-gather ──►  of all ranks' tokens
    this rank's experts           ── partial sums (P·T, H) in float32
                                  ── reduce-scatter ──►  (T, H) of its own tokens

Where ranks have the same tokens already, nothing is gathered, and the sums are added up on all of
them. It sends each token everywhere, P·T·H, whatever its experts; few launches and no sorting. All
ranks have to bring the same number of rows: the most that one of them has, and rows without experts
on the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import autograd
from .groups import Pending
from .layout import Layout
from .local import LocalExperts, Rows, each_slot, in_order, partial_sums
from .messages import send_rows
from .placement import Placement
from .routes import slots_of


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
        layout = self.layout
        self.tokens = x.shape[0]
        x = autograd.copy_to_all(x, layout.copies)
        weights = autograd.copy_to_all(weights, layout.copies)
        missing = self.rows - x.shape[0]
        if missing:
            x = torch.cat([x, x.new_zeros(missing, x.shape[1])])
            weights = torch.cat([weights, weights.new_zeros(missing, weights.shape[1])])
            ids = torch.cat([ids, ids.new_full((missing, ids.shape[1]), -1)])
        owners = layout.owners
        self.pending: list[Pending] = []
        if owners.size == 1:
            self.x, self.weights, self.ids = x, weights, ids
            return

        def send(part: Tensor, what: str) -> Tensor:
            self.pending.append(Pending(owners, f"gathering {what}"))
            return autograd.gather(part, owners, self.pending[-1])

        self.x, self.weights, self.ids = send_rows(x, weights, ids, send)

    def end(self, experts: LocalExperts) -> Tensor:
        """(T, H) in float32: the sums over all experts."""
        layout, placement = self.layout, self.placement
        for pending in self.pending:
            pending.wait()
        rank = layout.experts.rank
        rows = Rows(
            self.x,
            self.weights,
            slots_of(self.ids, placement, self._turns),
            placement.first_slots[rank],
            placement.num_slots,
        )
        what = "adding up what experts say"
        sums = each_slot(rows, experts) if self.slot_by_slot else partial_sums(rows, experts)
        sums = autograd.reduce_scatter(sums, layout.owners, what)
        sums = autograd.sum_over_all(sums, layout.copies, what)[: self.tokens]
        return in_order(sums) if self.slot_by_slot else sums

    def _turns(self) -> Tensor:
        """Which replica a row takes: counted on from the number of its rank."""
        row = torch.arange(self.ids.shape[0], device=self.ids.device)
        return row % max(self.rows, 1) + row // max(self.rows, 1)
