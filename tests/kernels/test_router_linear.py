"""The router's linear layer for few tokens, and `route` adding its parts up."""

from __future__ import annotations

import pytest
import torch

from tests.checking import assert_matches
from tmoe.kernels.route import route, route_ref
from tmoe.kernels.router_linear import router_linear, router_linear_ref

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32), (FP16, FP32)]
SIZES = [(1, 8, 32), (5, 60, 200), (17, 130, 300), (3, 4, 2100), (2, 200, 96)]  # T, E, H


def make(T, E, H, x_dtype, weight_dtype, device, bias=False):
    x = torch.randn(T, H, device=device).to(x_dtype)
    weight = torch.randn(E, H, device=device).to(weight_dtype)
    return x, weight, torch.randn(E, device=device).to(weight_dtype) if bias else None


@pytest.mark.parametrize("x_dtype, weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, E, H", SIZES, ids=str)
def test_logits(T, E, H, x_dtype, weight_dtype, device):
    """bf16 times fp32 is as exact as fp32: the weight is cut into three pieces, without loss."""
    for bias in (False, True):
        x, weight, b = make(T, E, H, x_dtype, weight_dtype, device, bias)
        parts = router_linear(x, weight, b)
        assert parts.shape[1:] == (T, E) and parts.dtype == FP32
        truth = router_linear_ref(x.double(), weight.double(), None if b is None else b.double())
        assert_matches(parts.sum(0).to(weight_dtype), truth, router_linear_ref(x, weight, b))


@pytest.mark.parametrize("x_dtype, weight_dtype", DTYPES[:4], ids=str)
def test_route_adds_the_parts_up(x_dtype, weight_dtype, device):
    """Rounded to the router's dtype, as a model that computes its logits there has them."""
    x, weight, _ = make(9, 60, 2100, x_dtype, weight_dtype, device)
    parts = router_linear(x, weight)
    assert parts.shape[0] > 1
    recipe = dict(top_k=4, score="sigmoid", renormalize=True, bias=torch.randn(60, device=device))
    logits = torch.empty(9, 60, dtype=weight_dtype, device=device)
    weights, ids = route(parts, sums=logits, **recipe)
    added = torch.zeros(9, 60, device=device)
    for part in parts:
        added += part
    assert torch.equal(logits, added.to(weight_dtype))
    alone = route(logits, **recipe)
    assert torch.equal(alone[0], weights) and torch.equal(alone[1], ids)
    assert torch.equal(route_ref(logits, **recipe)[1], ids)


def test_one_part(device):
    parts = torch.randn(1, 3, 8, device=device)
    logits = torch.empty(3, 8, dtype=BF16, device=device)
    route(parts, top_k=2, sums=logits)
    assert torch.equal(logits, parts[0].to(BF16))


@pytest.mark.parametrize("x_dtype, weight_dtype", DTYPES, ids=str)
def test_a_token_does_not_depend_on_its_batch(x_dtype, weight_dtype, device):
    x, weight, _ = make(33, 60, 300, x_dtype, weight_dtype, device)
    parts = router_linear(x, weight)
    for t in (0, 16, 32):
        assert torch.equal(router_linear(x[t : t + 1], weight)[:, 0], parts[:, t])


def test_rows_of_wider_matrices(device):
    x, weight, _ = make(5, 20, 400, FP32, FP32, device)
    got = router_linear(x[:, 40:240], weight[::2, 100:300])
    want = router_linear(x[:, 40:240].contiguous(), weight[::2, 100:300].contiguous())
    assert torch.equal(got, want)


def test_no_tokens(device):
    x, weight, _ = make(0, 20, 40, BF16, BF16, device)
    assert router_linear(x, weight).shape[1:] == (0, 20)
