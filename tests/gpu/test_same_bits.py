"""At a real shape: the same bits whatever the batch, if asked for, and the same bits in every run
without asking. And the sort, whose order all of that rests on."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.gpu.layers import QWEN3, inputs, run
from tmoe.kernels.sort import max_tiles, sort_ref, sort_tokens

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def weights():
    return QWEN3.weights(torch.device("cuda"), BF16)


def some(tensors, tokens):
    return {name: value[tokens] for name, value in tensors.items()}


def test_a_row_does_not_depend_on_its_batch(weights, device):
    """DT01"""
    tokens = inputs(QWEN3, 4096, device, BF16)
    whole = run(tokens | weights, QWEN3.keywords, batch_invariant=True)
    for T in (1, 2, 8, 33, 128, 1000):
        part = run(some(tokens, slice(T)) | weights, QWEN3.keywords, batch_invariant=True)
        assert torch.equal(part, whole[:T]), f"T={T}"
    for t in (1, 77, 4095):
        for beside in ([], [5], [9, 100, 2000]):
            some_tokens = some(tokens, [*beside, t])
            part = run(some_tokens | weights, QWEN3.keywords, batch_invariant=True)
            assert torch.equal(part[-1], whole[t])


@pytest.mark.parametrize("T", [1, 33, 128, 4096])
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["plain", "deterministic"])
def test_every_run_gives_the_same_bits(T, options, weights, device):
    tensors = inputs(QWEN3, T, device, BF16, "zipf") | weights
    first = run(tensors, QWEN3.keywords, **options)
    for _ in range(4):
        assert torch.equal(run(tensors, QWEN3.keywords, **options), first)


def test_the_grouped_gemm_does_not_depend_on_its_batch(weights, device):
    b = weights["gate_up_proj"][:4]
    a = torch.randn(3000, b.shape[2], device=device).to(BF16)
    many = torch.tensor([0, 2000, 2000, 2900, 3000], dtype=torch.int32, device=device)
    one = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32, device=device)
    with tmoe.options(backend="triton", batch_invariant=True):
        whole = tmoe.grouped_gemm(a, b, many)
        for row in (2000, 2500, 2899):
            assert torch.equal(tmoe.grouped_gemm(a[row : row + 1], b, one)[0], whole[row])


@pytest.mark.parametrize("T", [8192, 8193, 32768, 131072])
@pytest.mark.parametrize("E", [8, 128, 257])
def test_sort(T, E, device):
    """OV06, OV07, RT07: many blocks; every run the same."""
    ids = torch.randint(-1, E, (T, 8), device=device, dtype=torch.int32)
    order = sort_tokens(ids, num_experts=E, block_m=128)
    offsets, row_to_slot, slot_to_row = sort_ref(ids, num_experts=E)
    num_local = int(offsets[-1])
    assert torch.equal(order.expert_offsets, offsets)
    assert torch.equal(order.row_to_slot[:num_local], row_to_slot)
    assert torch.equal(order.slot_to_row, slot_to_row)

    counts = offsets.diff()
    tiles = (counts + 127) // 128
    count = order.num_tiles.item()
    assert count == tiles.sum().item() <= max_tiles(T * 8, E, 128)
    experts = torch.repeat_interleave(torch.arange(E, device=device), tiles)
    first = torch.arange(count, device=device) - (tiles.cumsum(0) - tiles)[experts]
    rows = offsets[experts] + 128 * first
    wanted = torch.stack([experts, rows, torch.minimum(rows + 128, offsets[experts + 1])], 1)
    assert torch.equal(order.tiles[:count], wanted.int())

    again = sort_tokens(ids, num_experts=E, block_m=128)
    assert torch.equal(again.slot_to_row, order.slot_to_row)  # DT04
