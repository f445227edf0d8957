"""The routed experts, from topk_ids to output: tmoe's backends and its peers."""

from __future__ import annotations

from functools import partial

import tmoe
from bench.cases import check_experts, num_inputs, num_touched, with_backend
from bench.peers import PEERS
from bench.roofline import experts_work
from tmoe.demo.shapes import random_inputs


def ours(backend, gate_up_proj, down_proj):
    layer = with_backend(tmoe.fused_experts, backend)
    return lambda x, topk_weights, topk_ids: layer(
        x, gate_up_proj, down_proj, topk_weights, topk_ids
    )


IMPLEMENTATIONS = {"triton": partial(ours, "triton"), "torch": partial(ours, "torch"), **PEERS}


def test_layer(measure, weights, shape, tokens, backend, device, dtype):
    inputs = [random_inputs(shape, tokens, device, dtype) for _ in range(num_inputs(tokens))]
    inputs = [(x, topk_weights, ids.int()) for x, topk_weights, ids in inputs]  # as routers give it

    def check(got, x, topk_weights, topk_ids):
        check_experts(got, x, *weights, topk_weights, topk_ids)

    touched = num_touched([topk_ids for _, _, topk_ids in inputs])
    work = experts_work(shape, tokens, touched, dtype.itemsize)
    measure(IMPLEMENTATIONS[backend](*weights), inputs, check, work)
