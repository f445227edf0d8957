"""The routed experts, from topk_ids to output: tmoe's backends and its peers."""

from __future__ import annotations

from tmoe.bench.cases import BACKENDS, experts_case

IMPLEMENTATIONS = BACKENDS


def test_layer(measure_case, weights, shape, tokens, backend, routing, device, dtype):
    measure_case(
        experts_case, shape, tokens, backend, weights, routing=routing, device=device, dtype=dtype
    )
