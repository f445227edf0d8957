"""The sort against its reference, and what the reference alone does not say: tiles, stability."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tmoe.kernels.sort as sort_module
from tmoe.kernels.sort import SortedTokens, max_tiles, sort_ref, sort_tokens, tile_rows


@pytest.fixture(params=["one-launch", "counted-first"])
def path(request, monkeypatch):
    """Both ways of counting, whatever the number of slots."""
    slots = 2**20 if request.param == "one-launch" else 0
    monkeypatch.setattr(sort_module, "RECOUNT_SLOTS", slots)


def tiles_of(order: SortedTokens) -> list[tuple[int, ...]]:
    """(expert, first row, end row) of each tile."""
    count = order.num_tiles.item()
    assert count <= len(order.tiles), "more tiles than the grid has programs for"
    return [tuple(tile) for tile in order.tiles[:count].tolist()]


def tiles_ref(offsets: list[int], block_m: int) -> list[tuple[int, ...]]:
    """Every row of every expert in exactly one tile."""
    return [
        (expert, row, min(row + block_m, end))
        for expert, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True))
        for row in range(start, end, block_m)
    ]


def check(ids: Tensor, num_experts: int, *, first_expert: int = 0, block_m: int = 16):
    order = sort_tokens(ids, num_experts=num_experts, first_expert=first_expert, block_m=block_m)
    offsets, row_to_slot, slot_to_row = sort_ref(
        ids, num_experts=num_experts, first_expert=first_expert
    )
    num_local = int(offsets[-1])
    assert order.expert_offsets.tolist() == offsets.tolist()
    assert order.row_to_slot[:num_local].tolist() == row_to_slot.tolist()
    assert order.slot_to_row.tolist() == slot_to_row.tolist()
    assert tiles_of(order) == tiles_ref(offsets.tolist(), block_m)
    assert order.taken.tolist() == [0]

    # A bijection between the rows and the slots that have one (OV06), and stable (DT04).
    flat = order.slot_to_row.flatten().tolist()
    assert sorted(row for row in flat if row >= 0) == list(range(num_local))
    slots = order.row_to_slot[:num_local].tolist()
    assert [flat[slot] for slot in slots] == list(range(num_local))
    chosen = ids.flatten().tolist()
    assert slots == sorted(slots, key=lambda slot: (chosen[slot], slot))
    return order


@pytest.mark.parametrize("T", [0, 1, 3, 31, 33, 63, 65])
def test_few_tokens(T, path, device):
    """EM08: odd numbers of tokens, one and none."""
    for E, K in ((1, 1), (3, 2), (5, 5)):
        check(torch.rand(T, E, device=device).argsort(-1)[:, :K], E)


@pytest.mark.parametrize("T", [255, 256, 257, 280, 513])
def test_more_tokens_than_a_block_has_slots(T, path, device):
    """OV06, OV07; 513 tokens pass RECOUNT_SLOTS."""
    check(torch.rand(T, 4, device=device).argsort(-1)[:, :2], 4)


@pytest.mark.parametrize("slots", [sort_module.RECOUNT_SLOTS, sort_module.RECOUNT_SLOTS + 1])
def test_where_counting_becomes_a_launch_of_its_own(slots, device):
    check(torch.randint(0, 5, (slots, 1), device=device), 5)


@pytest.mark.parametrize("E", [1, 3, 5, 60, 128, 257])
def test_every_number_of_experts(E, path, device):
    """RT07; most experts of the larger ones get nothing."""
    check(torch.randint(0, E, (21, min(E, 4)), device=device, dtype=torch.int32), E)


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
def test_tiles_of_every_height(block_m, path, device):
    """Experts with a full tile, one row more, one row less, and none at the start and the end."""
    counts = [0, block_m, block_m + 1, 0, block_m - 1, 1, 0]
    chosen = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    check(chosen[torch.randperm(len(chosen)), None].to(device), len(counts), block_m=block_m)


@pytest.mark.parametrize("expert", [0, 6])
def test_one_expert_takes_all(expert, path, device):
    """EP14: the first and the last one, alone and with the other slots spread."""
    check(torch.full((257, 1), expert, device=device), 7)
    spread = torch.arange(65, device=device) % 7
    check(torch.stack([torch.full_like(spread, expert), spread], 1), 7)


def test_the_same_expert_twice_in_one_token(path, device):
    check(torch.tensor([[2, 2, 0], [1, 1, 1]], device=device), 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_no_local_expert_have_no_row(dtype, path, device):
    """EP01, EP03, EP08: outside the window, -1, and what a cast to 32 bits would bring inside."""
    outside = [3, 8, -1, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:
        outside += [2**31, 2**32 + 4, -(2**32) + 5, 2**63 - 1, -(2**63)]
    ids = torch.tensor([[inside, out] for out in outside for inside in (4, 7)], dtype=dtype)
    order = check(ids.to(device), 4, first_expert=4)
    assert (order.slot_to_row[:, 1] == -1).all()
    none = check(ids[:, 1:].to(device), 4, first_expert=4)
    assert none.num_tiles.item() == none.expert_offsets.any() == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_strides(dtype, path, device):
    ids = torch.randint(-1, 5, (19, 3), device=device, dtype=dtype)
    wide = torch.full((23, 9), 99, device=device, dtype=dtype)
    wide[2:21, 1:7:2] = ids
    for view in (ids.t().contiguous().t(), wide[2:21, 1:7:2], ids[:1].expand(19, 3)):
        check(view, 5)


def test_more_blocks_than_one_step_of_the_scan(device):
    check(torch.randint(-1, 3, (64 * 128 + 9, 1), device=device), 3)


def test_every_run_gives_the_same_order(path, device):
    """DT04"""
    ids = torch.randint(0, 3, (150, 2), device=device)
    first = sort_tokens(ids, num_experts=3, block_m=16)
    for _ in range(3):
        again = sort_tokens(ids, num_experts=3, block_m=16)
        assert torch.equal(again.slot_to_row, first.slot_to_row)
        assert torch.equal(again.row_to_slot, first.row_to_slot)
        assert tiles_of(again) == tiles_of(first)


def test_the_input_stays_as_it_is(path, device):
    ids = torch.randint(-1, 5, (9, 2), device=device)
    before = ids.clone()
    sort_tokens(ids, num_experts=5, block_m=16)
    assert torch.equal(ids, before)


@pytest.mark.parametrize("counts", [[0, 0, 0], [4, 0], [0, 4], [0, 0, 4, 0], [33, 1, 16, 0, 17]])
@pytest.mark.parametrize("tail", [0, 5])
def test_tiles_of_rows_sorted_by_the_caller(counts, tail, device):
    """EM06; `tail` rows belong to no expert."""
    offsets = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    order = tile_rows(offsets, sum(counts) + tail, block_m=16)
    assert tiles_of(order) == tiles_ref(offsets.tolist(), 16)
    assert order.taken.tolist() == [0]


def test_the_grid_covers_the_worst_case():
    """`max_tiles` is reached when experts have one row more than a tile, and never passed."""
    for num_rows in range(0, 70, 3):
        for E in (1, 2, 5, 40):
            for block_m in (16, 32):
                lone = min(E - 1, num_rows)  # experts with a single row; the last takes the rest
                worst = lone + -(-(num_rows - lone) // block_m)
                assert worst <= max_tiles(num_rows, E, block_m) <= num_rows
