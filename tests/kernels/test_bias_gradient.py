"""Bias gradient: sums over ragged experts, of rows in expert order or gathered."""

from __future__ import annotations

import pytest
import torch

from tests.checking import assert_matches
from tmoe.kernels.bias_gradient import bias_gradient, bias_gradient_ref
from tmoe.kernels.permute import permute_ref
from tmoe.kernels.sort import sort_tokens

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def make(dtype, device, *, T=23, K=3, N=37):
    """dy (T, N), an order with dropped slots and an expert without rows, routing weights."""
    dy = torch.randn(T, N, device=device).to(dtype)
    ids = torch.randint(3, (T, K), device=device).int()
    ids[ids == 1] = 7
    ids[:, 0] = 0  # more rows than a step has
    order = sort_tokens(ids, num_experts=4, block_m=16)
    return dy, order, torch.rand(T * K, device=device)


def rows_of(dy, order, weights=None):
    return permute_ref(dy, order.row_to_slot[: int(order.expert_offsets[-1])], order.top_k, weights)


def check(got, dy, order, weights=None):
    truth = bias_gradient_ref(rows_of(dy.double(), order, weights), order.expert_offsets)
    naive = bias_gradient_ref(rows_of(dy.float(), order, weights), order.expert_offsets)
    assert_matches(got, truth, naive.to(got.dtype))
    assert not got[1].any() and not got[3].any()  # PD08


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 37, 128, 129])
def test_gathered_and_weighted(N, dtype, device):
    dy, order, weights = make(dtype, device, N=N)
    check(bias_gradient(dy.new_empty(4, N), dy, order, gather=True), dy, order)
    got = bias_gradient(dy.new_empty(4, N), dy, order, gather=True, row_weight=weights)
    check(got, dy, order, weights)


def test_rows_in_expert_order(device):
    """Rows of no expert hold NaN; the result may be stored transposed."""
    dy, order, _ = make(torch.bfloat16, device)
    rows = dy.new_full((dy.shape[0] * 3, 37), NAN)
    rows[: int(order.expert_offsets[-1])] = rows_of(dy, order)
    out = dy.new_empty(37, 4).t()
    check(bias_gradient(out, rows, order), dy, order)


def test_no_token(device):
    dy, order, _ = make(torch.float32, device, T=0)
    assert not bias_gradient(dy.new_empty(4, 37), dy, order, gather=True).any()
