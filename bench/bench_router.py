"""The router from hidden states: its linear layer and the selection, for decoding and beyond."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tmoe
from tmoe.bench.cases import num_inputs, with_backend
from tmoe.bench.reference import assert_matches
from tmoe.bench.roofline import Work
from tmoe.bench.shapes import routing_of
from tmoe.kernels.route_ref import route_ref
from tmoe.ops import router


def linear_then_route(x, weight, routing, *, bias):
    """torch's matmul, then the selection: what `router` is measured against."""
    logits = F.linear(x.to(weight.dtype), weight)
    return logits, *tmoe.route(logits, routing, bias=bias)


IMPLEMENTATIONS = {"triton": "triton", "torch": "torch"}


@pytest.mark.parametrize("function", [router, linear_then_route])
@pytest.mark.parametrize("fp32_router", [False, True])
def test_router(measure, shape, tokens, backend, fp32_router, function, device, dtype):
    weight_dtype = torch.float32 if fp32_router else dtype
    routing, E, H = routing_of(shape), shape.num_experts, shape.hidden
    bias = torch.randn(E, device=device) if routing.takes_bias else None
    weight = (torch.randn(E, H, device=device) / H**0.5).to(weight_dtype)
    inputs = [
        (torch.randn(tokens, H, device=device, dtype=dtype),) for _ in range(num_inputs(tokens))
    ]

    def run(x):
        return with_backend(function, IMPLEMENTATIONS[backend])(x, weight, routing, bias=bias)

    def check(got, x):
        logits, weights, ids = got
        truth = F.linear(x.double(), weight.double())
        assert_matches(logits, truth, F.linear(x.to(weight_dtype), weight))
        wanted, wanted_ids = route_ref(logits, bias=bias, **routing.kernel_arguments)
        exact, _ = route_ref(logits.double(), bias=bias, **routing.kernel_arguments)
        assert torch.equal(ids, wanted_ids)
        assert_matches(weights, exact, wanted)

    moved = dtype.itemsize * tokens * H + weight.nbytes + 4 * tokens * (E + 2 * shape.top_k)
    labels = {"function": function.__name__, "weight": str(weight_dtype).removeprefix("torch.")}
    measure(run, inputs, check, Work(2 * tokens * E * H, moved), **labels)
