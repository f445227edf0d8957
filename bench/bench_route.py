"""The selection: logits to topk_weights and topk_ids."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tmoe.bench.cases import num_inputs, with_backend
from tmoe.bench.reference import assert_matches
from tmoe.bench.roofline import Work
from tmoe.bench.shapes import routing_of
from tmoe.kernels.route_ref import route_ref

IMPLEMENTATIONS = {name: with_backend(tmoe.route, name) for name in ("triton", "torch")}


@pytest.mark.parametrize("method", [None, "Renormalize", "RenormalizeNaive"])
def test_route(measure, shape, tokens, backend, method, device):
    """None: the method of the model. The other two are what most models have."""
    routing = routing_of(shape)
    if method == routing.name:
        pytest.skip(f"{method} is the model's own method, measured as None")
    if method is not None:
        routing = tmoe.Routing(shape.num_experts, shape.top_k, method)
    bias = torch.randn(shape.num_experts, device=device) if routing.takes_bias else None
    inputs = [
        (torch.randn(tokens, shape.num_experts, device=device),) for _ in range(num_inputs(tokens))
    ]

    def route(logits):
        return IMPLEMENTATIONS[backend](logits, routing, bias=bias)

    def check(got, logits):
        weights, ids = route_ref(logits, bias=bias, **routing.kernel_arguments)
        truth, _ = route_ref(logits.double(), bias=bias, **routing.kernel_arguments)
        assert torch.equal(got[1], ids)
        assert_matches(got[0], truth, weights)

    moved = 4 * tokens * (shape.num_experts + 2 * shape.top_k)  # logits; weights and ids
    measure(route, inputs, check, Work(0, moved), method=routing.name)
