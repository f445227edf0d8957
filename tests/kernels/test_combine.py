"""Combine: every number of slots, slots without a row, strided memory, and the order of the sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.checking import assert_matches
from tmoe.kernels.combine import combine, combine_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def make(T: int, K: int, H: int, dtype: torch.dtype, device) -> tuple[Tensor, Tensor]:
    """Rows, and slots of which a quarter have none; rows that no slot names are NaN."""
    rows = torch.randn(T * K + 3, H).to(dtype)
    slot_to_row = torch.randperm(T * K).view(T, K).int()
    slot_to_row[torch.rand(T, K) < 0.25] = -1
    unused = torch.ones(len(rows), dtype=torch.bool)
    unused[slot_to_row[slot_to_row >= 0].long()] = False
    rows[unused] = NAN
    return rows.to(device), slot_to_row.to(device)


def check(rows: Tensor, slot_to_row: Tensor, out: Tensor) -> Tensor:
    assert combine(rows, slot_to_row, out) is out
    truth = combine_ref(rows.double(), slot_to_row)
    assert_matches(out, truth, combine_ref(rows.float(), slot_to_row).to(rows.dtype))
    dropped = (slot_to_row < 0).all(1)
    assert (out[dropped] == 0).all()  # PD03, EP09
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", range(1, 8))
def test_every_number_of_slots(K, dtype, device):
    """NC03: not 2, 3 and 4 only."""
    rows, slot_to_row = make(5, K, 37, dtype, device)
    check(rows, slot_to_row, rows.new_empty(5, 37))


@pytest.mark.parametrize("H", [1, 16, 1023, 1024, 1030])
def test_every_width(H, device):
    rows, slot_to_row = make(3, 2, H, torch.float32, device)
    check(rows, slot_to_row, rows.new_empty(3, H))


def test_no_token(device):
    rows = torch.randn(4, 8, device=device)
    out = combine(rows, torch.empty(0, 2, dtype=torch.int32, device=device), rows.new_empty(0, 8))
    assert out.shape == (0, 8)


def test_all_slots_dropped(device):
    """NaN rows times nothing are nothing: a select, not a product with 0."""
    rows = torch.full((4, 8), NAN, device=device)
    slots = torch.full((2, 2), -1, dtype=torch.int32, device=device)
    assert (combine(rows, slots, rows.new_empty(2, 8)) == 0).all()


def test_a_nan_stays_with_its_token(device):
    rows = torch.ones(4, 8, device=device)
    rows[2, 5] = NAN
    slots = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
    out = combine(rows, slots, rows.new_empty(2, 8))
    assert out.isnan().nonzero().tolist() == [[1, 5]]


@pytest.mark.parametrize("K", [1, 2, 4, 5])
def test_strided_memory(K, device):
    """NC02: out as a slice, transposed and every second column; rows as a slice."""
    rows, slot_to_row = make(4, K, 24, torch.bfloat16, device)
    wide_rows = rows.new_full((len(rows), 40), NAN)
    wide_rows[:, 8:32] = rows
    want = check(rows, slot_to_row, rows.new_empty(4, 24))
    for memory, view in (
        (rows.new_full((6, 30), 7.0), lambda x: x[1:5, 3:27]),
        (rows.new_full((24, 4), 7.0), lambda x: x.t()),
        (rows.new_full((4, 48), 7.0), lambda x: x[:, ::2]),
    ):
        out = check(wide_rows[:, 8:32], slot_to_row, view(memory))
        assert torch.equal(out, want)
        assert (memory == 7).sum() >= memory.numel() - out.numel(), "wrote beside the output"


def test_the_sum_runs_in_the_order_of_k(device):
    """In fp32 the order shows: 1e8 + 1 loses the 1."""
    rows = torch.tensor([[1e8], [1.0], [-1e8]], device=device).expand(3, 16).contiguous()
    slots = torch.tensor([[0, 1, 2], [0, 2, 1]], dtype=torch.int32, device=device)
    assert combine(rows, slots, rows.new_empty(2, 16))[:, 0].tolist() == [0.0, 1.0]


def test_a_row_does_not_depend_on_its_batch(device):
    """DT02: 32 tokens and 33 are summed alike."""
    rows, slot_to_row = make(33, 4, 40, torch.bfloat16, device)
    all_33 = combine(rows, slot_to_row, rows.new_empty(33, 40))
    for T in (1, 2, 32):
        assert torch.equal(combine(rows, slot_to_row[:T], rows.new_empty(T, 40)), all_33[:T])


def test_sixteen_bit_rows_are_added_in_fp32(device):
    """256 + 1 and 1 more: bf16 would lose both."""
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16, device=device)
    slots = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device)
    assert combine(rows.expand(3, 16).contiguous(), slots, rows.new_empty(1, 16))[0, 0] == 258
