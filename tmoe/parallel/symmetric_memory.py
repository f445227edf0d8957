"""All-to-all by hand: each rank writes its rows into the memory of the ranks that they are for.

    place, pack   as all-to-all does
    push          each row to its place in the buffer of its rank, over NVLink; barrier
    this rank's experts
    push          each sum to its place in the buffer of the rank that the token came from; barrier
    add up        as all-to-all does

Every rank has `capacity` rows in the buffer of each other one, so nothing is asked beforehand and
nothing depends on the data: the host needn't wait, and a CUDA graph captures it. Of those rows only
the ones in use are sent. They stand in the same order as all-to-all's of that capacity, so the
results are the same bits. It has no gradients.

Two barriers are enough, however many calls follow one another: rows are written where a rank's
experts read only after the second one, which all ranks reach when their experts are done; sums are
written where a rank adds up only after the first one of the next call, which it reaches when it has
added up.

Before the first call of a kind it is compared with all-to-all on that call's tokens, bit by bit; if
they differ, another exchange is used from then on, and a warning says so.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from . import autograd, groups
from .all_to_all import AllToAll
from .exchange_steps import push_rows
from .faults import RankLostError
from .layout import Layout
from .local import Rows
from .messages import ALIGNED, Tokens, as_bytes, routes_at, views
from .peers import Buffer, Peers
from .placement import Placement

NAME = "symmetric_memory"


class SymmetricMemory(AllToAll):
    """One call: `place` with a capacity, `begin`, then `end`."""

    def __init__(
        self, layout: Layout, placement: Placement, peers: Peers, kind: int, *,
        slot_by_slot: bool, sums: torch.dtype,
    ) -> None:  # fmt: skip
        """`kind`: a number of what all ranks are about to do."""
        super().__init__(layout, placement, slot_by_slot=slot_by_slot, sums=sums)
        self.peers, self.kind = peers, kind

    def _memory(self, rows: int, row_bytes: int) -> Tensor:
        device = self.parts.x.device
        self.peers.follow(device)
        self.messages = self._buffer("messages", rows * row_bytes, device)
        return self.messages.mine[: rows * row_bytes].view(rows, row_bytes)

    def _buffer(self, what: str, size: int, device: torch.device) -> Buffer:
        layout = self.layout
        return self.peers.buffer(what, size, device, layout.experts, layout.everyone)

    def _send(self, message: Tensor) -> None:
        go = message[: self.num_sent]
        self._push(
            self.messages, go, views(go, self.parts).slots, self.capacity, self.num_sent,
            message.shape[1], routes_at(self.parts),
        )  # fmt: skip
        self.pending = []

    def _bring_back(self, sums: Tensor, per_row: int) -> Tensor:
        rows, H = per_row * self.num_sent, sums.shape[1]
        row_bytes = -(-H * sums.itemsize // ALIGNED) * ALIGNED
        buffer = self._buffer("sums", rows * row_bytes, sums.device)
        slots = self.got.slots[: self.gap]
        if per_row > 1:
            slots = slots.reshape(-1, 1)
        self._push(buffer, sums, slots, per_row * self.capacity, 0, row_bytes, None)
        come = buffer.mine[: rows * row_bytes].view(rows, row_bytes)
        return come[:, : H * sums.itemsize].view(sums.dtype)

    def _push(
        self, buffer: Buffer, rows: Tensor, slots: Tensor, capacity: int, start: int,
        row_bytes: int, tail: int | None,
    ) -> None:  # fmt: skip
        push_rows(
            buffer.all, buffer.addresses, rows, slots, own=self.rank, capacity=capacity,
            start=start, row_bytes=row_bytes, tail=tail,
        )  # fmt: skip
        buffer.barrier(self.kind)

    def _needs_grad(self) -> bool:
        assert not super()._needs_grad(), "it has no gradients"
        return False


def verify(
    layout: Layout, placement: Placement, peers: Peers, inputs: tuple[Tensor, Tensor, Tensor],
    capacity: int, *, slot_by_slot: bool, sums: torch.dtype,
) -> None:  # fmt: skip
    """Bring these tokens to experts and back both ways. If a bit differs on a rank, or memory can't
    be had, `peers.reason` says so on all of them. A collective."""
    how = {"slot_by_slot": slot_by_slot, "sums": sums}
    room = [capacity] * layout.experts.size

    def result(exchange: AllToAll) -> Tensor:
        exchange.place(*inputs, capacity, None)
        exchange.begin(room, room)
        return exchange.end(row_by_row)

    right = result(AllToAll(layout, placement, **how))  # type: ignore[arg-type]
    try:
        found = result(SymmetricMemory(layout, placement, peers, 0, **how))  # type: ignore[arg-type]
    except RankLostError:
        raise
    except RuntimeError as error:
        reason = f"no memory that other ranks can write: {error}"
    else:
        differs = (_bits(found) != _bits(right)).any().int().view(1)
        every = groups.all_gather(differs, layout.everyone, "comparing two exchanges").tolist()
        wrong = [str(r) for r, differ in zip(layout.everyone.ranks, every, strict=True) if differ]
        tokens = f"{inputs[0].shape[0]} tokens here, rows for each rank {capacity}"
        reason = f"what it brought to rank {', '.join(wrong)} differed from all_to_all's ({tokens})"
        if not wrong:
            return
    peers.reason = reason
    warnings.warn(f"tmoe.parallel: {NAME} isn't used: {reason}", stacklevel=5)


def row_by_row(rows: Rows, dtype: torch.dtype) -> Tensor:
    """Experts that say to a row, and to nothing else, what depends on each of its bytes."""
    tokens, slots, H = Tokens.of(rows.x), rows.slots, rows.x.shape[1]
    x = tokens.x.view(torch.uint8) if tokens.x.itemsize == 1 else tokens.x
    x = x.to(autograd.wide(rows.weights.dtype)).repeat(1, -(-H // x.shape[1]))[:, :H]
    weights = torch.where(slots >= 0, rows.weights * (slots + 1), 0.0)
    factor = weights[:, :1]
    for weight in weights.unbind(1)[1:]:  # one after the other: always the same bits
        factor = factor * 1.5 + weight[:, None]
    if tokens.scale is not None:
        for scale in tokens.scale.float().unbind(1):
            factor = factor * 1.25 + scale[:, None]
    return torch.where((slots >= 0).any(1, keepdim=True), x * factor, 0.0).to(dtype)


def _bits(x: Tensor) -> Tensor:
    """So that a NaN equals itself."""
    return as_bytes(x)
