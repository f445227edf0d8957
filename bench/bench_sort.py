"""The sort: topk_ids to expert order, with the row tiles that the grouped GEMM takes."""

from __future__ import annotations

import torch

from tmoe.bench.cases import num_inputs
from tmoe.bench.roofline import Work
from tmoe.bench.shapes import routed_inputs
from tmoe.kernels.sort import sort_ref, sort_tokens
from tmoe.kernels.tiles import choose_tiles


def triton_sort(shape, topk_ids, dtype):
    rows_per_expert = topk_ids.numel() / shape.num_experts
    tiles = choose_tiles(
        topk_ids.device, dtype, rows_per_expert=rows_per_expert, intermediate=shape.intermediate
    )
    block_m = tiles.gate_up.block_m
    order = sort_tokens(topk_ids, num_experts=shape.num_experts, block_m=block_m)
    return order.expert_offsets, order.row_to_slot, order.slot_to_row


def torch_sort(shape, topk_ids, dtype):
    """In torch without waiting for the device, as a model would have it."""
    keys, row_to_slot = topk_ids.flatten().sort(stable=True)
    experts = torch.arange(shape.num_experts + 1, device=keys.device, dtype=keys.dtype)
    rows = torch.arange(keys.numel(), device=keys.device)
    slot_to_row = torch.empty_like(rows).scatter_(0, row_to_slot, rows)
    return torch.searchsorted(keys, experts), row_to_slot, slot_to_row.view(topk_ids.shape)


IMPLEMENTATIONS = {"triton": triton_sort, "torch": torch_sort}


def test_sort(measure, shape, tokens, backend, routing, device, dtype):
    inputs = [
        (routed_inputs(shape, tokens, device, dtype, routing, seed)[2],)
        for seed in range(num_inputs(tokens))
    ]

    def sort(topk_ids):
        return IMPLEMENTATIONS[backend](shape, topk_ids, dtype)

    def check(got, topk_ids):
        wanted = sort_ref(topk_ids, num_experts=shape.num_experts)
        assert all(torch.equal(a.int(), b) for a, b in zip(got, wanted, strict=True))

    moved = 4 * (3 * tokens * shape.top_k + shape.num_experts + 1)  # ids; the two maps, offsets
    measure(sort, inputs, check, Work(0, moved), routing=routing)
