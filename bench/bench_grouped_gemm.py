"""The grouped GEMM on sorted rows, at the sizes of a layer's two projections."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tmoe.bench.cases import num_inputs, with_backend
from tmoe.bench.reference import assert_matches, some_rows
from tmoe.bench.roofline import Work
from tmoe.bench.shapes import routed_inputs

IMPLEMENTATIONS = {name: with_backend(tmoe.grouped_gemm, name) for name in ("triton", "torch")}


@pytest.mark.parametrize("projection", ["gate_up", "down"])
def test_grouped_gemm(measure, weights, shape, tokens, backend, routing, device, dtype, projection):
    b = weights[("gate_up", "down").index(projection)]
    S, (E, N, D) = tokens * shape.top_k, b.shape
    inputs = []
    for seed in range(num_inputs(tokens)):
        _, _, topk_ids = routed_inputs(shape, tokens, device, dtype, routing, seed)
        counts = topk_ids.flatten().bincount(minlength=E)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        inputs.append((torch.randn(S, D, device=device).to(dtype), offsets))

    def grouped_gemm(a, expert_offsets):
        return IMPLEMENTATIONS[backend](a, b, expert_offsets)

    def check(got, a, expert_offsets):
        assert got.isfinite().all(), "not finite"
        rows = some_rows(S, device, wanted=16)
        experts = torch.searchsorted(expert_offsets[1:], rows, right=True)
        for row, expert in zip(rows.tolist(), experts.tolist(), strict=True):
            truth = b[expert].double() @ a[row].double()
            assert_matches(got[row], truth, b[expert] @ a[row])

    touched = sum((offsets.diff() > 0).sum().item() for _, offsets in inputs) / len(inputs)
    work = Work(2 * S * N * D, dtype.itemsize * (touched * N * D + S * (N + D)))
    measure(grouped_gemm, inputs, check, work, projection=projection, routing=routing)
