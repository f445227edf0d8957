"""Permute: rows in expert order, with and without their routing weight."""

from __future__ import annotations

import pytest
import torch

from tests.checking import assert_matches
from tests.layouts import STRIDED
from tmoe.kernels.permute import permute, permute_ref
from tmoe.kernels.sort import sort_tokens

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(T, K, H, dtype, device):
    """x, an order in which a quarter of the slots have no row, and routing weights."""
    x = torch.randn(T, H, device=device).to(dtype)
    ids = torch.randint(5, (T, K), device=device).int()
    ids[torch.rand(T, K, device=device) < 0.25] = -1
    return x, sort_tokens(ids, num_experts=5, block_m=16), torch.rand(T * K, device=device)


def check(x, order, weights=None, out=None):
    S, rows = order.slot_to_row.numel(), int(order.expert_offsets[-1])
    out = x.new_full((S, x.shape[1]), 7.0) if out is None else out
    assert permute(out, x, order, row_weight=weights) is out
    slots = order.row_to_slot[:rows]
    if weights is None:
        assert torch.equal(out[:rows], permute_ref(x, slots, order.top_k))
    else:
        truth = permute_ref(x.double(), slots, order.top_k, weights)
        naive = permute_ref(x.float(), slots, order.top_k, weights).to(x.dtype)
        assert_matches(out[:rows], truth, naive)
    assert (out[rows:] == 7).all(), "wrote a row of no expert"
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, K, H", [(1, 1, 1), (9, 3, 40), (5, 8, 1030), (17, 1, 1024)])
def test_rows(T, K, H, dtype, device):
    x, order, weights = make(T, K, H, dtype, device)
    check(x, order)
    check(x, order, weights)


@pytest.mark.parametrize("layout", STRIDED)
def test_strided_memory(layout, device):
    x, order, weights = make(6, 2, 24, torch.bfloat16, device)
    check(STRIDED[layout](x), order, weights)
    memory = x.new_full((12, 40), 7.0)
    check(x, order, out=memory[:, 8:32])
    assert (memory[:, :8] == 7).all() and (memory[:, 32:] == 7).all(), "wrote beside the output"


def test_no_token(device):
    x, order, _ = make(0, 2, 8, torch.float32, device)
    assert permute(x.new_empty(0, 8), x, order).shape == (0, 8)
