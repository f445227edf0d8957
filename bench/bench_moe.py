"""The whole layer, from the router's logits to output."""

from __future__ import annotations

from dataclasses import replace

import torch

import tmoe
from tmoe.bench.cases import num_inputs, num_touched, with_backend
from tmoe.bench.reference import check_experts
from tmoe.bench.roofline import experts_work
from tmoe.bench.shapes import routing_of
from tmoe.kernels.route_ref import route_ref

IMPLEMENTATIONS = {name: with_backend(tmoe.moe, name) for name in ("triton", "torch")}


def test_moe(measure, weights, shape, tokens, backend, device, dtype):
    routing = routing_of(shape)
    inputs = [
        (
            torch.randn(tokens, shape.hidden, device=device).to(dtype),
            torch.randn(tokens, shape.num_experts, device=device),
        )
        for _ in range(num_inputs(tokens))
    ]
    routes = [route_ref(logits, **routing.kernel_arguments) for _, logits in inputs]

    def moe(x, logits):
        return IMPLEMENTATIONS[backend](x, logits, *weights, routing)

    def check(got, x, logits):
        route = route_ref(logits, **routing.kernel_arguments)
        check_experts(got, x, *weights, *route, weight_on_input=routing.weight_on_input)

    work = experts_work(shape, tokens, num_touched([ids for _, ids in routes]), dtype.itemsize)
    logits_bytes = 4 * tokens * shape.num_experts
    measure(moe, inputs, check, replace(work, bytes=work.bytes + logits_bytes))
