"""What the kernels of the exchanges compute, in PyTorch: `exchange_place.py`, `exchange_pack.py`,
`exchange_push.py`, `exchange_sum.py`. Without Triton, and without waiting for the device.

T tokens, K experts per token, P ranks; N = num_sent + rows that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PHI = 2654435769  # of 2^32


class Slots(NamedTuple):
    """Which slots are whose; int32. The last two are None where slots are the experts in order."""

    first: Tensor  # (P + 1,)  rank p has slots [first[p], first[p + 1])
    num_experts: int
    of_experts: Tensor | None = None  # (E, R)  the slots of each expert, R the most copies
    copies: Tensor | None = None  # (E,)


class Places(NamedTuple):
    """int32, computed once and handed on."""

    slots: Tensor  # (T, K)  -1 = none
    rows: Tensor  # (T, P)  -1 = the token doesn't go there
    counts: Tensor  # (P,)  tokens that go, or want to go, to each rank


class Parts(NamedTuple):
    """Of tokens, or of the messages that they become. Rows may have any stride."""

    x: Tensor  # (T, W)
    scale: Tensor | None  # (T, C)
    slots: Tensor  # (T, K) int32; of messages: counted from the receiver's first
    weights: Tensor  # (T, K)


def copy_of(number: Tensor, experts: Tensor, copies: Tensor) -> Tensor:
    """Which copy of an expert a token goes to, where the expert has n of them:

        copy = floor(n · frac((t + p) φ)),    φ = (√5 - 1) / 2

    t is the token's number, and p shifts experts against one another, so that a token's popular
    experts aren't all on the first copies. The multiples of φ fill [0, 1) evenly, whichever stretch
    of tokens chose the expert, or every how manyth of them: of m such tokens each copy gets m / n,
    give or take a few. So copies are used evenly without counting, the choice for a token depends
    on its number and on the expert alone, and nothing waits for the device.

    number: of tokens, experts: their ids, copies: how many each of these has; int64, of shapes that
    broadcast. Returns numbers below `copies`.
    """
    shifted = number + experts * (experts + 1) // 2
    return ((shifted * PHI & 0xFFFFFFFF) * copies) >> 32


def place_ref(
    topk_ids: Tensor, slots: Slots, *, first_turn: int = 0, own: int = 0, capacity: int = 0
) -> Places:
    """See `exchange_place.place`."""
    (T, _), P = topk_ids.shape, slots.first.numel() - 1
    known = (topk_ids >= 0) & (topk_ids < slots.num_experts)
    e = topk_ids.long().masked_fill(~known, 0)
    found = e
    if slots.of_experts is not None and slots.copies is not None:
        turn = torch.arange(first_turn, first_turn + T, device=e.device)[:, None]
        found = slots.of_experts[e, copy_of(turn, e, slots.copies[e].long())]
    found = found.masked_fill(~known, -1).int()
    first, end = slots.first[:-1], slots.first[1:]
    goes = ((found[:, :, None] >= first) & (found[:, :, None] < end)).any(1)
    place = goes.cumsum(0) - 1
    fits = goes
    if capacity:
        fits = goes & (place < capacity)
        place = place + starts(P, own, capacity, place.device)
    return Places(found, place.masked_fill(~fits, -1).int(), goes.sum(0).int())


def starts(P: int, own: int, capacity: int, device: torch.device) -> Tensor:
    """(P,): each rank's first row. Other ranks' come first, those that stay are the last."""
    p = torch.arange(P, device=device)
    return torch.where(p == own, P - 1, p - (p > own).long()) * capacity


def rows_back(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """rows (T, P) -> of each of `num_rows` its token and its rank, -1 where a row has none."""
    T, P = rows.shape
    to = torch.where(rows >= 0, rows, num_rows).long().flatten()
    pair = torch.full((num_rows + 1,), -1, device=rows.device)
    pair = pair.scatter_(0, to, torch.arange(T * P, device=rows.device))[:num_rows]
    none = pair < 0
    return (pair // P).masked_fill(none, -1), (pair % P).masked_fill(none, -1)


def local_slots(slots: Tensor, first: Tensor, token: Tensor, rank: Tensor) -> Tensor:
    """(N, K) int32: the slots of each row's token, counted from its rank's first; -1 for others."""
    if slots.shape[0] == 0:
        return slots.new_full((token.shape[0], slots.shape[1]), -1)
    of_token, p = slots[token.clamp(min=0)], rank.clamp(min=0)
    begin, end = first[p][:, None], first[p + 1][:, None]
    here = (of_token >= begin) & (of_token < end) & (token >= 0)[:, None]
    return torch.where(here, of_token - begin, -1)


def pack_ref(
    message: Parts, tokens: Parts, places: Places, first: Tensor, *, num_sent: int, gap: int
) -> None:
    """See `exchange_pack.pack`. What no token stands in isn't written, slots and weights aside."""
    num_rows = message.x.shape[0] - gap
    token, rank = rows_back(places.rows, num_rows)
    row = torch.arange(num_rows, device=token.device)
    to = torch.where(row < num_sent, row, row + gap)
    there = token >= 0
    slots = local_slots(tokens.slots, first, token, rank)
    message.slots[to] = slots
    weights = message.weights.new_zeros(slots.shape)
    if tokens.x.shape[0]:
        of_token = tokens.weights[token.clamp(min=0)]
        weights = of_token.masked_fill(~there[:, None], 0.0)
        for out, part in ((message.x, tokens.x), (message.scale, tokens.scale)):
            if out is not None and part is not None:
                out, part = out.view(torch.uint8), part.contiguous().view(torch.uint8)
                out[to] = torch.where(there[:, None], part[token.clamp(min=0)], out[to])
    message.weights[to] = weights


def push_ref(
    peers: Sequence[Tensor], rows: Tensor, slots: Tensor, *, own: int, capacity: int,
    start: int = 0, row_bytes: int, tail: int | None = None,
) -> None:  # fmt: skip
    """See `exchange_push.push`; peers are the buffers themselves, each (bytes,) uint8."""
    size = rows.shape[1] * rows.itemsize
    used = (slots >= 0).any(1)
    for other, p in enumerate(p for p in range(len(peers)) if p != own):
        first = start + (own - (own > p)) * capacity
        there = peers[p][first * row_bytes : (first + capacity) * row_bytes]
        there = there.view(capacity, row_bytes)[:, :size]
        mine = slice(other * capacity, (other + 1) * capacity)
        goes = used[mine, None].expand(capacity, size).clone()
        if tail is not None:
            goes[:, tail:] = True
        there.copy_(torch.where(goes, rows[mine].contiguous().view(torch.uint8), there))


def sum_ref(back: Tensor, own: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """See `exchange_sum.sum_rows`; sums in float32, or in float64 of float64."""
    every = torch.cat([back, own])
    total = every.new_zeros(
        rows.shape[0], every.shape[1], dtype=torch.promote_types(every.dtype, torch.float32)
    )
    if every.shape[0] == 0:
        return total.to(dtype)
    for column in rows.unbind(1):
        there = (column >= 0)[:, None]
        total = total + every[column.clamp(min=0).long()].masked_fill(~there, 0.0)
    return total.to(dtype)
