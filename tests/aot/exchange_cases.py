"""The kernels of the all-to-all exchange, as `tmoe.parallel` launches them, and of rows that came
as codes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.aot.case import Case, empty
from tmoe.kernels.exchange_pack import pack
from tmoe.kernels.exchange_place import place
from tmoe.kernels.exchange_push import push
from tmoe.kernels.exchange_ref import Parts, Places, Slots
from tmoe.kernels.exchange_sum import sum_rows
from tmoe.kernels.spread_codes import spread_codes
from tmoe.parallel.messages import row_bytes, views

E, K, P = 256, 8, 8


def _place(T: int, copies: bool) -> Places:
    slots = Slots(empty(P + 1), E)
    if copies:
        slots = slots._replace(of_experts=empty(E, 2), copies=empty(E))
    dropped = empty(1, dtype=torch.int64) if copies else None
    return place(empty(T, K), slots, own=3, capacity=max(1, T // 4), dropped=dropped)


def _pack(T: int, H: int, dtype: torch.dtype, scales: int) -> None:
    scale = empty(T, scales, dtype=torch.float32) if scales else None
    weights = empty(T, K, dtype=torch.float32)
    tokens = Parts(empty(T, H, dtype=dtype), scale, empty(T, K), weights)
    message = views(empty(2 * T * P, row_bytes(tokens), dtype=torch.uint8), tokens)
    places = Places(empty(T, K), empty(T, P), empty(P))
    sent = (P - 1) * T
    pack(message, tokens, places, empty(P + 1), own=3, capacity=T, num_sent=sent, gap=sent)


def _push(T: int, row_bytes: int, tail: int | None, dtype: torch.dtype = torch.uint8) -> None:
    rows, n = empty(T * (P - 1), row_bytes // dtype.itemsize, dtype=dtype), 2 * (P - 1) * T
    peers = empty(P, dtype=torch.int64)
    slots = empty(len(rows), K)
    push(peers, rows, slots, own=3, capacity=T, start=n, row_bytes=row_bytes, tail=tail)


def _sum(T: int, H: int, columns: int, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    back, own = empty(T * (P - 1), H, dtype=dtype), empty(T, H, dtype=dtype)
    return sum_rows(empty(T, H, dtype=out), back, own, empty(T, columns))


def _spread(T: int, H: int) -> tuple[Tensor, Tensor]:
    codes, scale = empty(T, H, dtype=torch.float8_e4m3fn), empty(T, H // 128, dtype=torch.float32)
    return spread_codes(codes, scale, empty(T, K))


def exchange_cases() -> list[Case]:
    return [Case(name, launch) for name, launch in _launches().items()]


def _launches() -> dict[str, Callable[[], object]]:
    """By name."""
    fp32, bf16, e4m3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
    return {
        **{
            f"exchange place T={T}{' copies' if copies else ''}": lambda T=T, copies=copies: _place(
                T, copies
            )
            for T in (1, 128, 8192)
            for copies in (False, True)
        },
        "exchange pack bf16": lambda: _pack(8192, 7168, bf16, 0),
        "exchange pack bf16, narrow": lambda: _pack(1, 2048, bf16, 0),
        "exchange pack fp8 1x128": lambda: _pack(8192, 7168, e4m3, 56),
        "exchange pack fp64": lambda: _pack(16, 90, torch.float64, 0),
        "exchange push tokens": lambda: _push(8192, 14464, 14336),
        "exchange push sums": lambda: _push(128, 4 * 7168, None, fp32),
        "exchange push sums, odd": lambda: _push(16, 26, None, bf16),
        "spread codes": lambda: _spread(8192, 7168),
        "spread codes, unaligned": lambda: _spread(16, 258),
        "exchange sum fp32": lambda: _sum(8192, 7168, P, fp32, bf16),
        "exchange sum bf16": lambda: _sum(16, 2048, K, bf16, bf16),
    }
