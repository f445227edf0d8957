"""All-to-all: every token goes to the ranks that have its experts, and their sums come back.

    x, weights, ids of each rank  ── dispatch ──►  rows for this rank's experts
    this rank's experts           ── partial sums in float32
                                  ── combine  ──►  added up at each token's own rank

A token goes to a rank once, however many of its experts are there, and what comes back is one row.
Ranks that have the same tokens each send a share of them and put the shares together at the end.

*Exact*: rows as many as there are. How many come is known after a first exchange of counts, for
which the host waits. *Fixed*: `capacity` rows for each rank, used or not, so that nothing depends
on the data: no waiting, and a CUDA graph captures it. With a capacity of all tokens nothing can
overflow; with fewer, what doesn't fit is left out and counted.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from . import autograd
from .groups import Pending
from .layout import Layout
from .local import LocalExperts, Rows, each_slot, partial_sums
from .messages import send_rows
from .placement import Placement
from .routes import ranks_of, slots_of, visits


class AllToAll:
    """One call: `count` (exact only), `begin`, then `end`."""

    def __init__(self, layout: Layout, placement: Placement, *, slot_by_slot: bool) -> None:
        """`slot_by_slot`: add up as one rank does, slot by slot, bit by bit; K rows come back for
        each one that was sent."""
        self.layout, self.placement, self.slot_by_slot = layout, placement, slot_by_slot

    def count(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x (T, H), weights (T, K) float32, ids (T, K) -> (P,) int64, rows for each rank."""
        layout, placement = self.layout, self.placement
        self.tokens = x.shape[0]
        mine = autograd.part(self.tokens, layout.shares)
        self.x = autograd.take_part(autograd.copy_to_all(x, layout.width), layout.shares)
        weights = autograd.copy_to_all(weights, layout.width)
        self.weights = autograd.take_part(weights, layout.shares)
        rank = layout.experts.rank
        turn = partial(torch.arange, mine.start + rank, mine.stop + rank, device=x.device)
        self.slots = slots_of(ids[mine], placement, turn)
        self.ranks = ranks_of(self.slots, placement)
        self.visits = visits(self.ranks, placement.num_ranks)
        return self.visits.sum(0)

    def begin(self, sent: list[int], received: list[int]) -> None:
        """Start sending, so many rows to each rank and from each rank."""
        places = self.visits.t().flatten().cumsum(0).sub_(1).view(self.visits.shape[::-1]).t()
        self.spread = 1 - (1 - 1 / self.placement.num_ranks) ** self.slots.shape[1]
        self._begin(places, self.visits, sum(sent), sent, received)

    def begin_fixed(self, capacity: int) -> Tensor:
        """Start sending `capacity` rows to each rank. Returns how many rows didn't fit, as a tensor
        on the device."""
        P = self.placement.num_ranks
        place = self.visits.cumsum(0) - 1  # (T, P), among the rows for that rank
        fits = self.visits & (place < capacity)
        place = place + torch.arange(P, device=place.device) * capacity
        counts = [capacity] * P
        self.spread = capacity / max(len(self.visits), 1)
        self._begin(place, fits, P * capacity, counts, counts)
        return (self.visits & ~fits).sum()

    def _begin(
        self, places: Tensor, goes: Tensor, rows: int, sent: list[int], received: list[int]
    ) -> None:
        """`places` (T, P): the row of a token that goes to a rank; `rows`, of which some may stay
        unused."""
        self.sent, self.received = sent, received
        self.rows_of = places.masked_fill(~goes, -1)
        T, device = places.shape[0], places.device
        tokens = torch.arange(T, device=device)[:, None].expand_as(places)
        # One more row than there are takes what goes nowhere.
        to = torch.where(goes, places, rows).flatten()
        owner = torch.full((rows + 1,), -1, device=device)
        owner = owner.scatter_(0, to, tokens.flatten())[:rows]
        self.token = owner.clamp(min=0)
        slots = self.slots.new_full((rows, self.slots.shape[1]), -1)
        x, weights = self.x[:0], self.weights[:0]
        if T > 0:
            slots = self.slots[self.token].masked_fill((owner < 0)[:, None], -1)
            x = autograd.rows_of_tokens(self.x, self.token, self.rows_of)
            weights = autograd.rows_of_tokens(self.weights, self.token, self.rows_of)
        elif rows:  # fixed: rows that say nothing
            x, weights = (t.new_zeros(rows, t.shape[1]) for t in (x, weights))
        experts, self.pending = self.layout.experts, list[Pending]()

        def send(part: Tensor, what: str) -> Tensor:
            self.pending.append(Pending(experts, f"sending {what} to their experts"))
            return autograd.exchange(part, sent, received, experts, self.pending[-1])

        self.got = send_rows(x, weights, slots, send)

    def end(self, experts: LocalExperts) -> Tensor:
        """(T, H) in float32: the sums over all experts."""
        layout, placement = self.layout, self.placement
        for pending in self.pending:
            pending.wait()
        x, weights, slots = self.got
        rank, K = layout.experts.rank, slots.shape[1]
        first = placement.first_slots[rank]
        held = placement.counts[rank]
        # Of a row's K slots few are for this rank; the load of an expert is that of R·K / usual.
        usual = round(placement.num_slots * self.spread)
        rows = Rows(x, weights, slots - first, 0, max(held, K, usual))
        say = each_slot(rows, experts).flatten(0, 1) if self.slot_by_slot else None
        if say is None:
            say, per_row = partial_sums(rows, experts), 1
        else:
            per_row = K
        back = Pending(layout.experts, "sending sums back to their tokens")
        sent, received = ([per_row * n for n in counts] for counts in (self.sent, self.received))
        say = autograd.exchange(say, received, sent, layout.experts, back)
        back.wait()
        token, rows_of = self.token, self.rows_of
        if self.slot_by_slot:
            token = token.repeat_interleave(K)
            rows_of = rows_of.gather(1, self.ranks.clamp(min=0)).masked_fill(self.ranks < 0, -1)
            which = torch.arange(K, device=rows_of.device)
            rows_of = torch.where(rows_of < 0, -1, rows_of * K + which)
        sums = autograd.sum_of_rows(say, token, rows_of)
        sums = autograd.sum_over_all(sums, layout.width, "adding up what experts say")
        return autograd.join(sums, self.tokens, layout.shares)
