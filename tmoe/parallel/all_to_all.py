"""All-to-all: every token goes to the ranks that have its experts, and their sums come back.

    x, weights, ids of each rank  ── dispatch ──►  rows for this rank's experts
    this rank's experts           ── partial sums (R, H)
                                  ── combine  ──►  added up in float32 at each token's own rank

A token goes to a rank once, however many of its experts are there, and what comes back is one row.
A row for this rank's own experts isn't sent. Ranks that have the same tokens each send a share of
them and put the shares together at the end.

*Exact*: rows as many as there are. How many come is known after a first exchange of counts, for
which the host waits. *Fixed*: `capacity` rows for each rank, used or not, so that nothing depends
on the data: no waiting, and a CUDA graph captures it. With a capacity of all tokens nothing can
overflow; with fewer, what doesn't fit is left out and counted.

Rows are numbered as a message has them: those for other ranks, rank by rank, then those that stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tmoe.kernels.exchange_ref import Parts, local_slots, rows_back

from . import autograd
from .autograd import wide
from .exchange_steps import add_up, pack_tokens, place_tokens
from .groups import Pending
from .layout import Layout
from .local import LocalExperts, Rows, each_slot
from .messages import Tokens, row_bytes, views
from .placement import Placement
from .routes import ranks_of, slots_on


class AllToAll:
    """One call: `place`, `begin`, then `end`."""

    def __init__(
        self, layout: Layout, placement: Placement, *, slot_by_slot: bool, sums: torch.dtype
    ) -> None:
        """`slot_by_slot`: add up as one rank does, slot by slot, bit by bit; K rows come back for
        each one that was sent. `sums`: the dtype in which partial sums come back."""
        self.layout, self.placement, self.slot_by_slot = layout, placement, slot_by_slot
        self.sums, self.rank = sums, layout.experts.rank
        self.under_way: list[tuple[Tensor, Tensor]] = []  # with gradients: what comes, what stays

    def place(
        self, x: Tensor, weights: Tensor, ids: Tensor, capacity: int, dropped: Tensor | None
    ) -> Tensor:
        """x (T, H), weights (T, K) float32, ids (T, K) -> (P,) int32, rows for each rank.
        `capacity`: 0 for exact."""
        layout = self.layout
        self.count, self.dtype, self.capacity = x.shape[0], x.dtype, capacity
        mine = autograd.part(self.count, layout.shares)
        self.tokens = Tokens.of(x)
        data = autograd.take_part(autograd.copy_to_all(self.tokens.x, layout.width), layout.shares)
        weights = autograd.copy_to_all(weights, layout.width)
        weights = autograd.take_part(weights, layout.shares)
        self.slots = slots_on(self.placement, x.device)
        self.places = place_tokens(
            ids[mine], self.slots, first_turn=mine.start + self.rank, own=self.rank,
            capacity=capacity, dropped=dropped,
        )  # fmt: skip
        scale = None if self.tokens.scale is None else self.tokens.scale[mine]
        self.parts = Parts(data, scale, self.places.slots, weights)
        return self.places.counts

    def begin(self, sent: list[int], received: list[int]) -> None:
        """Start sending, so many rows to each rank and from each rank."""
        stay = sent[self.rank]
        self.sent, self.received = (
            [0 if p == self.rank else n for p, n in enumerate(counts)]
            for counts in (sent, received)
        )
        self.num_sent, self.gap = sum(self.sent), sum(self.received)
        if not self.capacity:
            self._number_rows()
        if self._needs_grad():
            self._begin_with_gradients(self.num_sent + stay)
            return
        parts = self.parts
        message = self._memory(self.num_sent + self.gap + stay, row_bytes(parts))
        pack_tokens(
            views(message, parts), parts, self.places, self.slots.first, own=self.rank,
            capacity=self.capacity, num_sent=self.num_sent, gap=self.gap,
        )  # fmt: skip
        self._send(message)
        self.got = views(message[self.num_sent :], parts)

    def end(self, experts: LocalExperts) -> Tensor:
        """(T, H): the sums over all experts, rounded to the dtype of x."""
        layout, placement = self.layout, self.placement
        for pending in self.pending:
            pending.wait()
        if self.under_way:
            x, here, weights = (torch.cat(come_and_stay) for come_and_stay in self.under_way)
            self.got = Parts(x, None, here, weights)
        x, K = self.tokens.like(self.got.x, self.got.scale), self.got.slots.shape[1]
        # Of a row's K slots few are for this rank; the load of an expert is that of R·K / usual.
        num_slots = max(placement.counts[self.rank], K, round(placement.num_slots * self._spread()))
        rows = Rows(x, self.got.weights, self.got.slots, 0, num_slots)
        per_row = K if self.slot_by_slot else 1
        if self.slot_by_slot:
            say = each_slot(rows, experts, self.sums).flatten(0, 1)
        else:
            say = experts(rows, self.sums)
        away, own = say[: per_row * self.gap], say[per_row * self.gap :]
        returned = self._bring_back(away, per_row)
        rounded = self.dtype if layout.width.size == 1 else wide(self.dtype)
        rows_of = self._rows_of_slots(K) if self.slot_by_slot else self.places.rows
        sums = self._add_up(returned, own, rows_of, rounded)
        sums = autograd.sum_over_all(sums, layout.width, "adding up what experts say")
        return autograd.join(sums.to(self.dtype), self.count, layout.shares)

    # How bytes go, which `SymmetricMemory` does otherwise ---------------------------------------

    def _memory(self, rows: int, row_bytes: int) -> Tensor:
        """(rows, row_bytes) uint8, for the messages that go, that come, and that stay."""
        return torch.empty(rows, row_bytes, dtype=torch.uint8, device=self.parts.x.device)

    def _send(self, message: Tensor) -> None:
        """Begin to send its first rows; what comes stands behind them."""
        self.pending = [self._step("tokens")]
        autograd.exchange(
            message[: self.num_sent], self.sent, self.received, self.layout.experts,
            self.pending[0], message[self.num_sent : self.num_sent + self.gap],
        )  # fmt: skip

    def _bring_back(self, sums: Tensor, per_row: int) -> Tensor:
        """What this rank says to the rows that came, `per_row` sums to each -> what others say to
        those that it sent."""
        back = self._step("sums back")
        sent, received = ([per_row * n for n in counts] for counts in (self.sent, self.received))
        returned = autograd.exchange(sums, received, sent, self.layout.experts, back)
        back.wait()
        return returned

    # ------------------------------------------------------------------------------------------

    def _number_rows(self) -> None:
        """Of exact mode: each rank's rows begin where those of the one before end."""
        starts, total = [], 0
        for count in self.sent:
            starts.append(total)
            total += count
        starts[self.rank] = total
        first = torch.tensor(starts, dtype=torch.int32, device=self.places.rows.device)
        rows = self.places.rows
        self.places = self.places._replace(rows=torch.where(rows < 0, rows, rows + first))

    def _spread(self) -> float:
        """Which part of all tokens a row is, roughly: how likely one goes to a rank."""
        if self.capacity:
            return min(1.0, self.capacity / max(len(self.places.rows), 1))
        return 1 - (1 - 1 / self.placement.num_ranks) ** self.places.slots.shape[1]

    def _rows_of_slots(self, K: int) -> Tensor:
        """(T, K): of each token, the row in which its k-th expert says something."""
        ranks = ranks_of(self.places.slots, self.placement)
        rows = self.places.rows.gather(1, ranks.clamp(min=0))
        which = torch.arange(K, device=rows.device, dtype=rows.dtype)
        return torch.where((ranks < 0) | (rows < 0), -1, rows * K + which)

    def _step(self, what: str) -> Pending:
        return Pending(self.layout.experts, f"sending {what}")

    # With gradients --------------------------------------------------------------------------

    def _needs_grad(self) -> bool:
        parts = self.parts
        return torch.is_grad_enabled() and (parts.x.requires_grad or parts.weights.requires_grad)

    def _begin_with_gradients(self, num_rows: int) -> None:
        """Each part on its own, so that what comes back is its gradient."""
        x, _, slots, weights = self.parts
        assert self.tokens.made_of is None, "codes have no gradient"
        rows = self.places.rows
        token, rank = rows_back(rows, num_rows)
        here = local_slots(slots, self.slots.first, token, rank)
        self.token = token.clamp(min=0)
        if rows.shape[0] > 0:
            x = autograd.rows_of_tokens(x, self.token, rows)
            weights = autograd.rows_of_tokens(weights, self.token, rows)
        else:  # no token; with fixed sizes there are rows nevertheless, which say nothing
            x, weights = (torch.cat([t, t.new_zeros(num_rows, t.shape[1])]) for t in (x, weights))
        self.pending = []

        def send(part: Tensor, what: str) -> tuple[Tensor, Tensor]:
            self.pending.append(self._step(what))
            come = autograd.exchange(
                part[: self.num_sent], self.sent, self.received, self.layout.experts,
                self.pending[-1],
            )  # fmt: skip
            return come, part[self.num_sent :]

        self.under_way = [send(x, "tokens"), send(here, "slots"), send(weights, "weights")]

    def _add_up(self, back: Tensor, own: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if not (torch.is_grad_enabled() and (back.requires_grad or own.requires_grad)):
            return add_up(back, own, rows, dtype)
        every = torch.cat([back, own])
        every = every.to(wide(every.dtype))
        token = rows_back(rows, every.shape[0])[0].clamp(min=0)
        return autograd.sum_of_rows(every, token, rows).to(dtype)
