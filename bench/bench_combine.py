"""The combine: each token's K expert rows summed up."""

from __future__ import annotations

import torch

from tmoe.bench.cases import num_inputs
from tmoe.bench.reference import assert_matches
from tmoe.bench.roofline import Work
from tmoe.bench.shapes import routed_inputs
from tmoe.kernels.combine import combine, combine_ref
from tmoe.kernels.sort import sort_ref


def triton_combine(rows, slot_to_row):
    T, H = slot_to_row.shape[0], rows.shape[1]
    return combine(rows, slot_to_row, rows.new_empty(T, H))


IMPLEMENTATIONS = {"triton": triton_combine, "torch": combine_ref}


def test_combine(measure, shape, tokens, backend, routing, device, dtype):
    S, E, H = tokens * shape.top_k, shape.num_experts, shape.hidden
    inputs = []
    for seed in range(num_inputs(tokens)):
        _, _, topk_ids = routed_inputs(shape, tokens, device, dtype, routing, seed)
        _, _, slot_to_row = sort_ref(topk_ids, num_experts=E)
        inputs.append((torch.randn(S, H, device=device).to(dtype), slot_to_row))

    def check(got, rows, slot_to_row):
        truth = combine_ref(rows.float(), slot_to_row)
        assert_matches(got, truth, truth.to(dtype))

    work = Work(S * H, dtype.itemsize * (S + tokens) * H + 4 * S)
    measure(IMPLEMENTATIONS[backend], inputs, check, work, routing=routing)
