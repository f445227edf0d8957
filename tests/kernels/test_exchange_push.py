"""Rows that go into other ranks' memory: all ranks of a group, each with a buffer here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tmoe.kernels.exchange_push import push
from tmoe.kernels.exchange_ref import push_ref


@dataclass(frozen=True)
class Case:
    why: str
    P: int = 2
    C: int = 3
    W: int = 40  # bytes of a row
    K: int = 2
    apart: int = 48  # bytes from one row to the next, where it is read
    there: int = 64  # and where it is written
    start: int = 0
    tail: int | None = None
    dtype: torch.dtype = torch.uint8


CASES = [
    Case("two ranks"),
    Case("four ranks, in front of others' rows", P=4, C=2, start=5),
    Case("the tail of a row without a slot", P=3, tail=32, start=1),
    Case("no rows", C=0),
    Case("one row of one slot", C=1, K=1),
    Case("more than a block", W=4160, apart=4224, there=4224, C=2, tail=4128),
    Case("16 bits, odd width", dtype=torch.bfloat16, W=26, apart=26, there=32, P=3),
    Case("float32", dtype=torch.float32, W=36, apart=36, there=48, K=1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.why)
@pytest.mark.parametrize("function", [push, push_ref], ids=["triton", "torch"])
def test_rows_stand_where_they_belong(case, function, device):
    """By hand; every other byte stays as it was. What isn't used may be NaN and isn't written."""
    P, C, size = case.P, case.C, (case.P - 1) * case.C
    rows_there = case.start + size + 2
    buffers = [
        torch.full((rows_there * case.there,), 255, dtype=torch.uint8, device=device)
        for _ in range(P)
    ]
    wanted = [buffer.clone().view(rows_there, case.there) for buffer in buffers]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], device=device)
    peers = buffers if function is push_ref else addresses
    for own in range(P):
        torch.manual_seed(own)
        memory = torch.randint(0, 250, (size, case.apart), dtype=torch.uint8).to(device)
        rows = memory[:, : case.W].view(case.dtype)
        slots = torch.randint(-1, 2, (size, case.K), dtype=torch.int32).to(device)
        slots[::3] = -1
        for q, p in enumerate(p for p in range(P) if p != own):
            among = [r for r in range(P) if r != p].index(own)
            for i in range(C):
                used = bool((slots[q * C + i] >= 0).any())
                begin = 0 if used else case.W if case.tail is None else case.tail
                to = case.start + among * C + i
                wanted[p][to, begin : case.W] = memory[q * C + i, begin : case.W]
        function(
            peers, rows, slots, own=own, capacity=C, start=case.start, row_bytes=case.there,
            tail=case.tail,
        )  # fmt: skip
    for got, want in zip(buffers, wanted, strict=True):
        assert torch.equal(got, want.flatten())


def test_a_row_is_used_whichever_of_its_slots_is(device):
    buffers = [torch.zeros(64, dtype=torch.uint8, device=device) for _ in range(2)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], device=device)
    rows = torch.ones(4, 16, dtype=torch.uint8, device=device)
    slots = torch.tensor([[-1, 0, -1], [-1, -1, 5], [-1, -1, -1], [7, -1, -1]], device=device)
    push(addresses, rows, slots.int(), own=0, capacity=4, row_bytes=16)
    assert buffers[1].view(4, 16)[:, 0].tolist() == [1, 1, 0, 1] and not buffers[0].any()
