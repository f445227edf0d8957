"""Tokens on their way to the ranks of their experts: where they go, what is sent, what comes back.

The kernels against their references, and the references against a loop over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.checking import assert_matches
from tmoe.kernels.exchange_pack import pack
from tmoe.kernels.exchange_place import place
from tmoe.kernels.exchange_ref import (
    Parts,
    Places,
    Slots,
    copy_of,
    pack_ref,
    place_ref,
    sum_ref,
)
from tmoe.kernels.exchange_sum import sum_rows
from tmoe.parallel import Placement

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    why: str
    T: int = 5
    K: int = 2
    E: int = 6
    ranks: tuple[tuple[int, ...], ...] | None = None
    P: int = 2
    own: int = 0
    capacity: int = 0
    H: int = 24
    dtype: torch.dtype = torch.float32
    scales: int = 0

    @property
    def placement(self) -> Placement:
        if self.ranks is None:
            return Placement.contiguous(self.E, self.P)
        return Placement(self.E, self.ranks)

    def slots(self, device) -> Slots:
        placement = self.placement

        def tensor(values):
            return torch.tensor(values, dtype=torch.int32, device=device)

        first = tensor([*placement.first_slots, placement.num_slots])
        if placement.in_order:
            return Slots(first, self.E)
        most = max(map(len, placement.expert_slots))
        rows = [(slots * most)[:most] for slots in placement.expert_slots]
        return Slots(first, self.E, tensor(rows), tensor(list(map(len, placement.expert_slots))))

    def ids(self, device) -> torch.Tensor:
        """A fifth of them -1, and one past the last expert."""
        ids = torch.rand(self.T, self.E).argsort(1)[:, : self.K]
        ids[torch.rand(self.T, self.K) < 0.2] = -1
        if self.T:
            ids[-1, -1] = self.E
        return ids.to(device)


CASES = [
    Case("two ranks"),
    Case("the last rank's", own=1),
    Case("no token", T=0),
    Case("no token, rows for some", T=0, capacity=2),
    Case("one token", T=1, K=1),
    Case("uneven", P=4, E=7, K=5, own=2),
    Case("out of order", ranks=((5, 0, 3), (1, 2, 4))),
    Case("copies", ranks=((0, 1, 2, 3), (3, 0, 4), (0, 5)), T=40, K=3),
    Case("room for all", capacity=5),
    Case("more room than tokens", capacity=7, own=1),
    Case("no room for some", capacity=2, P=3, own=1, T=9),
    Case("bf16", dtype=torch.bfloat16, H=26),
    Case("16 bits, odd width", dtype=torch.float16, H=13),
    Case("fp64", dtype=torch.float64, H=3),
    Case("codes and scales", dtype=torch.float8_e4m3fn, H=72, scales=3),
    Case("codes and scales, odd", dtype=torch.float8_e4m3fn, H=13, scales=1, capacity=5),
]


MANY = Case("more than a block", T=1030, K=9, E=24, P=3, own=1)


@pytest.fixture(params=CASES, ids=lambda c: c.why)
def case(request):
    return request.param


def placed(case: Case, device, function=place, **more) -> Places:
    ids, slots = case.ids(device), case.slots(device)
    return function(ids, slots, first_turn=3, own=case.own, capacity=case.capacity, **more)


def by_hand(case: Case, ids: list[list[int]]) -> tuple[list, list, list]:
    """A loop over tokens."""
    placement, P = case.placement, len(case.placement.ranks)
    order = [p for p in range(P) if p != case.own] + [case.own]
    counts, slots, rows = [0] * P, [], []
    for t, chosen in enumerate(ids):
        mine = []
        for e in chosen:
            found = placement.expert_slots[e] if 0 <= e < case.E else (-1,)
            turn = torch.tensor(3 + t), torch.tensor(e), torch.tensor(len(found))
            mine.append(found[int(copy_of(*turn)) if len(found) > 1 else 0])
        slots.append(mine)
        row = []
        for p in range(P):
            goes = any(slot >= 0 and placement.slot_ranks[slot] == p for slot in mine)
            fits = goes and (case.capacity == 0 or counts[p] < case.capacity)
            row.append(order.index(p) * case.capacity + counts[p] if fits else -1)
            counts[p] += goes
        rows.append(row)
    return slots, rows, counts


@pytest.mark.parametrize("case", [*CASES, MANY], ids=lambda c: c.why)
@pytest.mark.parametrize("function", [place, place_ref], ids=["triton", "torch"])
def test_where_tokens_go(case, function, device):
    torch.manual_seed(0)
    found = placed(case, device, function)
    torch.manual_seed(0)
    slots, rows, counts = by_hand(case, case.ids(device).tolist())
    assert found.slots.tolist() == slots
    assert found.rows.tolist() == rows
    assert found.counts.tolist() == counts
    assert {part.dtype for part in found} == {torch.int32}


def test_ids_of_other_types_and_strides(device):
    case = Case("", T=9)
    ids, slots = case.ids(device), case.slots(device)
    want = place(ids, slots)
    wide = torch.full((9, 6), 99, device=device, dtype=torch.int32)
    wide[:, 1::3] = ids.int()
    for same in (wide[:, 1::3], ids.t().contiguous().t()):
        for got, part in zip(place(same, slots), want, strict=True):
            assert torch.equal(got, part)


def test_what_does_not_fit_is_counted(device):
    case = Case("", T=9, capacity=2)
    dropped = torch.tensor([10], device=device)
    for _ in range(2):  # it adds up
        found = placed(case, device, dropped=dropped)
    torch.manual_seed(0)
    once = (found.counts - 2).clamp(min=0).sum().item()
    assert dropped.item() > 10 + once > 10


def make_parts(case: Case, device, places: Places, rows: int, filled: bool) -> Parts:
    """Tokens with NaN beside them, or a message that nobody wrote: all views of wider rows."""

    def part(width, dtype):
        size = width * dtype.itemsize
        memory = torch.full((rows, -(-size // 16) * 16 + 32), 255, dtype=torch.uint8, device=device)
        view = memory[:, 16 : 16 + size].view(dtype)  # 255 everywhere is NaN
        if filled:
            values = torch.randn(rows, width, device=device)
            view.view(torch.uint8).copy_(values.to(dtype).view(torch.uint8))
        return view

    K = places.slots.shape[1]
    scale = part(case.scales, torch.float32) if case.scales else None
    weights = torch.float64 if case.dtype == torch.float64 else torch.float32
    x, slots = part(case.H, case.dtype), part(K, torch.int32)
    return Parts(x, scale, places.slots if filled else slots, part(K, weights))


def packed(case: Case, device, function, starts=None, gap=3) -> tuple[Parts, Parts, Places, int]:
    torch.manual_seed(1)
    places = placed(case, device)
    if case.capacity == 0:
        first = torch.zeros_like(places.counts)
        total = 0
        for p in [p for p in range(len(first)) if p != case.own] + [case.own]:
            first[p] = total
            total += int(places.counts[p])
        places = places._replace(rows=torch.where(places.rows < 0, -1, places.rows + first))
        num_sent, rows = total - int(places.counts[case.own]), total
    else:
        P = places.rows.shape[1]
        num_sent, rows = (P - 1) * case.capacity, P * case.capacity
    tokens = make_parts(case, device, places, case.T, True)
    message = make_parts(case, device, places, rows + gap, False)
    first = case.slots(device).first
    more = {"own": case.own, "capacity": case.capacity} if function is pack else {}
    function(message, tokens, places, first, num_sent=num_sent, gap=gap, **more)
    return message, tokens, places, num_sent


def assert_bytes_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("function", [pack, pack_ref], ids=["triton", "torch"])
def test_what_a_message_says(case, function, device):
    """Each row of every rank, and the rows that nobody goes to; nothing is written in the gap."""
    message, tokens, places, num_sent = packed(case, device, function)
    first, gap = case.slots(device).first.tolist(), 3
    untouched, _, _, _ = packed(case, device, lambda *a, **k: None)
    used = set()
    for t, row in enumerate(places.rows.tolist()):
        for p, r in enumerate(row):
            if r < 0:
                continue
            r += gap if r >= num_sent else 0
            used.add(r)
            assert_bytes_equal(message.x[r], tokens.x[t])
            assert_bytes_equal(message.weights[r], tokens.weights[t])
            if case.scales:
                assert_bytes_equal(message.scale[r], tokens.scale[t])
            here = [
                s - first[p] if first[p] <= s < first[p + 1] else -1
                for s in tokens.slots[t].tolist()
            ]
            assert message.slots[r].tolist() == here
    for r in set(range(len(message.x))) - used:
        if num_sent <= r < num_sent + gap:
            assert_bytes_equal(message.slots[r], untouched.slots[r])
            assert_bytes_equal(message.x[r], untouched.x[r])
        else:
            assert message.slots[r].eq(-1).all() and message.weights[r].eq(0).all()


def test_a_nan_weight_stays_with_its_token(device):
    """A row that nobody uses has weight 0, not 0 · NaN."""
    case = Case("", T=3, capacity=3, K=1)
    places = placed(case, device)
    tokens = make_parts(case, device, places, 3, True)
    tokens.weights.fill_(NAN)
    message = make_parts(case, device, places, 6, False)
    pack(message, tokens, places, case.slots(device).first, capacity=3, num_sent=3, gap=0)
    none = message.slots.eq(-1).all(1)
    assert none.any() and message.weights[none].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T, columns, H", [(0, 2, 8), (1, 1, 1), (5, 2, 37), (3, 9, 1030)])
def test_sums(T, columns, H, dtype, device):
    """SH11: of any width. Rows that no token names are NaN."""
    every = torch.randn(T * columns + 4, H).to(dtype)
    rows = torch.randperm(T * columns).view(T, columns).int()
    rows[torch.rand(T, columns) < 0.3] = -1
    unused = torch.ones(len(every), dtype=torch.bool)
    unused[rows[rows >= 0].long()] = False
    every[unused] = NAN
    every, rows = every.to(device), rows.to(device)
    for num_sent in (0, len(every) // 2, len(every)):
        back, own = every[:num_sent], every[num_sent:]
        for out_dtype in {dtype, torch.float32}:
            out = every.new_empty(T, H, dtype=out_dtype)
            assert sum_rows(out, back, own, rows) is out
            truth = sum_ref(back.double(), own.double(), rows, torch.float64)
            assert_matches(out, truth, sum_ref(back, own, rows, out_dtype))


def test_sums_run_in_the_order_of_columns(device):
    rows = torch.tensor([[0, 1, 2], [0, 2, 1]], dtype=torch.int32, device=device)
    every = torch.tensor([[1e8], [1.0], [-1e8]], device=device).expand(3, 16).contiguous()
    out = sum_rows(every.new_empty(2, 16), every[:1], every[1:], rows)
    assert out[:, 0].tolist() == [0.0, 1.0]


def test_cases_differ():
    """That no case is another one by mistake."""
    assert len({replace(case, why="") for case in CASES}) == len(CASES)
