"""Tuning on a GPU: real candidates, a right result, and a graph that captures it."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.dispatch.conftest import empty_store  # noqa: F401  (a fixture)
from tests.gpu.layers import QWEN3, check_tokens, inputs
from tmoe.dispatch import measure
from tmoe.dispatch.problem import Machine

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("empty_store")]


@pytest.mark.parametrize("T", [1, 100])
def test_a_tuned_layer_is_right_and_captures(T, device):
    weights = QWEN3.weights(device, torch.bfloat16)
    static = inputs(QWEN3, T, device, torch.bfloat16) | weights
    with tmoe.autotune(tiles=True, quick=True):
        tmoe.fused_experts(**static, **QWEN3.keywords)
    ((_, times),) = [
        (key, times)
        for key, times in measure.store_of(Machine.of(device)).read().items()
        if key.endswith(" by triton")
    ]
    assert len(times) > 2 and all(0.001 < ms < 10 for ms in times.values())
    with tmoe.options(backend="triton"):
        want = tmoe.fused_experts(**static, **QWEN3.keywords)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = tmoe.fused_experts(**static, **QWEN3.keywords)
    graph.replay()
    assert torch.equal(y, want)
    check_tokens(y, sorted({0, T // 2, T - 1}), static, QWEN3.keywords)
