"""Clear tail: rows that belong to no expert become 0, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from tmoe.kernels.clear_tail import clear_tail, clear_tail_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def offsets_to(end: int, device) -> torch.Tensor:
    return torch.tensor([0, end // 2, end // 2, end], dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("end", [0, 1, 15, 16, 49, 50])
def test_rows_past_the_last_offset(end, dtype, device):
    """PD01, PD09: what was never written may hold NaN."""
    out = torch.randn(50, 37, device=device).to(dtype)
    out[end:] = float("nan")
    want = clear_tail_ref(out, offsets_to(end, device))
    assert clear_tail(out, offsets_to(end, device)) is out
    assert torch.equal(out, want) and (out[end:] == 0).all()


@pytest.mark.parametrize("N", [1, 128, 129])
def test_every_width(N, device):
    out = torch.ones(20, N, device=device)
    clear_tail(out, offsets_to(3, device))
    assert out.sum().item() == 3 * N


def test_more_rows_than_programs(device):
    """With 256 programs of 16 rows, the first ones come round again."""
    out = torch.ones(256 * 16 + 40, 3, device=device)
    clear_tail(out, offsets_to(5, device))
    assert out.sum(1).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_the_columns_beside_a_slice_stay(device):
    memory = torch.ones(9, 30, device=device)
    clear_tail(memory[:, 4:20], offsets_to(2, device))
    assert memory.sum().item() == 9 * 30 - 7 * 16


def test_empty(device):
    for shape in ((0, 8), (4, 0)):
        assert clear_tail(torch.ones(shape, device=device), offsets_to(0, device)).shape == shape
