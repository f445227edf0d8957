"""Weighted combine: the gradients of x and of a routing weight on the input."""

from __future__ import annotations

import pytest
import torch

from tests.checking import assert_matches
from tmoe.kernels.weighted_combine import weighted_combine, weighted_combine_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def make(T, K, H, dtype, device):
    """Rows that no slot names, and the weights of slots without a row, are NaN."""
    rows, x = torch.randn(T * K + 3, H).to(dtype), torch.randn(T, H).to(dtype)
    weights, slots = torch.rand(T, K), torch.randperm(T * K).view(T, K).int()
    dropped = torch.rand(T, K) < 0.25
    slots[dropped], weights[dropped] = -1, NAN
    unused = torch.ones(len(rows), dtype=torch.bool)
    unused[slots[slots >= 0].long()] = False
    rows[unused] = NAN
    x[dropped.all(1)] = NAN
    return tuple(t.to(device) for t in (rows, x, weights, slots))


def check(rows, x, weights, slots):
    (T, K), H = slots.shape, rows.shape[1]
    out, dots = rows.new_empty(T, H), weights.new_empty(T, K)
    weighted_combine(rows, x, weights, slots, out=out, dots=dots)
    truth = weighted_combine_ref(rows.double(), x.double(), weights.double(), slots)
    naive = weighted_combine_ref(rows.float(), x.float(), weights, slots)
    assert_matches(out, truth[0], naive[0].to(rows.dtype))
    assert_matches(dots, truth[1], naive[1].to(rows.dtype))
    assert (dots[slots < 0] == 0).all() and (out[(slots < 0).all(1)] == 0).all()
    for wanted in ({"out": rows.new_empty(T, H)}, {"dots": weights.new_empty(T, K)}):
        weighted_combine(rows, x, weights, slots, **wanted)
        assert all(torch.equal(got, {"out": out, "dots": dots}[n]) for n, got in wanted.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, K, H", [(1, 1, 1), (9, 3, 40), (5, 8, 1030)])
def test_both_results_and_each_alone(T, K, H, dtype, device):
    check(*make(T, K, H, dtype, device))


def test_strided_x(device):
    rows, x, weights, slots = make(6, 2, 24, torch.bfloat16, device)
    check(rows, x.t().contiguous().t(), weights, slots)


def test_no_token(device):
    rows, x, weights, slots = make(0, 2, 8, torch.float32, device)
    weighted_combine(rows, x, weights, slots, out=rows.new_empty(0, 8))
