"""What exchanges do beside sending, and how rows go into others' memory: Triton's kernels on a
GPU, their references in PyTorch elsewhere, and for float64. Both give the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tmoe.kernels import exchange_ref as ref
from tmoe.kernels.exchange_ref import Parts, Places, Slots


@cache
def _kernels() -> SimpleNamespace | None:
    """The kernels, imported by the first call; None without Triton."""
    if find_spec("triton") is None:
        return None
    from tmoe.kernels.exchange_pack import pack
    from tmoe.kernels.exchange_place import place
    from tmoe.kernels.exchange_push import push
    from tmoe.kernels.exchange_sum import sum_rows

    return SimpleNamespace(pack=pack, place=place, push=push, sum_rows=sum_rows)


def place_tokens(
    topk_ids: Tensor, slots: Slots, *, own: int, capacity: int, first_turn: int,
    dropped: Tensor | None,
) -> Places:  # fmt: skip
    """See `tmoe.kernels.exchange_place.place`."""
    where = {"own": own, "capacity": capacity, "first_turn": first_turn}
    kernels = _kernels() if topk_ids.is_cuda else None
    if kernels is not None:
        places: Places = kernels.place(topk_ids, slots, dropped=dropped, **where)
        return places
    found = ref.place_ref(topk_ids, slots, **where)
    if dropped is not None:
        dropped += (found.counts - capacity).clamp(min=0).sum()
    return found


def pack_tokens(
    message: Parts, tokens: Parts, places: Places, first: Tensor, *, own: int, capacity: int,
    num_sent: int, gap: int,
) -> None:  # fmt: skip
    """See `tmoe.kernels.exchange_pack.pack`."""
    where: dict[str, Any] = {"num_sent": num_sent, "gap": gap}
    kernels = _kernels() if tokens.x.is_cuda else None
    if kernels is not None:
        x = tokens.x if tokens.x.stride(1) == 1 else tokens.x.contiguous()
        weights = tokens.weights if tokens.weights.stride(1) == 1 else tokens.weights.contiguous()
        tokens = tokens._replace(x=x, weights=weights)
        kernels.pack(message, tokens, places, first, own=own, capacity=capacity, **where)
    else:
        ref.pack_ref(message, tokens, places, first, **where)


def push_rows(
    peers: Sequence[Tensor], addresses: Tensor, rows: Tensor, slots: Tensor, **where: Any
) -> None:
    """See `tmoe.kernels.exchange_push.push`; peers: the buffers at `addresses`."""
    kernels = _kernels() if rows.is_cuda else None
    if kernels is not None:
        kernels.push(addresses, rows, slots, **where)
    else:
        ref.push_ref(peers, rows, slots, **where)


def add_up(back: Tensor, own: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, H) in `dtype`; see `tmoe.kernels.exchange_sum.sum_rows`."""
    kernels = _kernels() if back.is_cuda and back.dtype != torch.float64 else None
    if kernels is not None:
        out = back.new_empty(rows.shape[0], back.shape[1], dtype=dtype)
        y: Tensor = kernels.sum_rows(out, back, own, rows)
        return y
    return ref.sum_ref(back, own, rows, dtype)
