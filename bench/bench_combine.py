"""The combine: each token's K expert rows summed up."""

from __future__ import annotations

import torch

from bench.cases import num_inputs
from bench.roofline import Work
from tests.checking import assert_matches
from tmoe.demo.shapes import random_inputs
from tmoe.kernels.combine import combine, combine_ref
from tmoe.kernels.sort import sort_ref


def triton_combine(rows, slot_to_row):
    T, H = slot_to_row.shape[0], rows.shape[1]
    return combine(rows, slot_to_row, rows.new_empty(T, H))


IMPLEMENTATIONS = {"triton": triton_combine, "torch": combine_ref}


def test_combine(measure, shape, tokens, backend, device, dtype):
    S, E, H = tokens * shape.top_k, shape.num_experts, shape.hidden
    inputs = []
    for _ in range(num_inputs(tokens)):
        _, _, topk_ids = random_inputs(shape, tokens, device, dtype)
        _, _, slot_to_row = sort_ref(topk_ids, num_experts=E)
        inputs.append((torch.randn(S, H, device=device).to(dtype), slot_to_row))

    def check(got, rows, slot_to_row):
        truth = combine_ref(rows.float(), slot_to_row)
        assert_matches(got, truth, truth.to(dtype))

    work = Work(S * H, dtype.itemsize * (S + tokens) * H + 4 * S)
    measure(IMPLEMENTATIONS[backend], inputs, check, work)
