"""Used tokens: those with a row, whatever else their slots say."""

from __future__ import annotations

import pytest
import torch

from tmoe.kernels.used_tokens import used_tokens


@pytest.mark.parametrize("T, K", [(0, 2), (1, 1), (5, 3), (300, 8)])
def test_tokens_with_a_row(T, K, device):
    slot_to_row = torch.randint(0, 50, (T, K), dtype=torch.int32, device=device)
    slot_to_row[torch.rand(T, K, device=device) < 0.6] = -1
    token = torch.arange(T, device=device)
    want = torch.where((slot_to_row >= 0).any(1), token, -1).int()
    assert torch.equal(used_tokens(slot_to_row), want)
