"""A token's copy of an expert: always the same one, and all copies used evenly."""

from __future__ import annotations

import math

import pytest
import torch

import tmoe
from tmoe.parallel.balance import balance
from tmoe.parallel.balance_replicas import ReplicaTables, choose_slots
from tmoe.parallel.placement import Placement

PLACEMENT = Placement(4, ((0, 1), (0, 2), (0, 3), (1, 0)))  # expert 0 is everywhere, 1 on two


@pytest.fixture
def tables():
    return ReplicaTables.of(PLACEMENT)


def test_tables_say_where_the_copies_are(tables):
    assert tables.count.tolist() == [4, 2, 1, 1]
    assert tables.slots.tolist() == [[0, 2, 4, 7], [1, 6, -1, -1], [3, -1, -1, -1], [5, -1, -1, -1]]


def test_a_slot_holds_the_expert_that_was_chosen(tables):
    _, ids = tmoe.simulate_routing(500, 4, 2, distribution="skewed", skew=1.2)
    ids[::7] = -1
    ids[3, 0] = 4  # a sentinel
    chosen = choose_slots(ids, tables)
    experts = torch.tensor(PLACEMENT.slot_experts)
    real = (ids >= 0) & (ids < 4)
    assert chosen.dtype == torch.int32 and torch.equal(chosen >= 0, real)
    assert torch.equal(experts[chosen[real].long()], ids[real].long())
    assert torch.equal(chosen, choose_slots(ids.long(), tables))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 8])
def test_copies_are_used_evenly(tables, step):
    """Also where every other token, or every fourth, chose the expert: a remainder would not."""
    for tokens in (4, 16, 101, 4096):
        ids = torch.full((tokens * step, 1), -1)
        ids[::step] = 0
        counts = choose_slots(ids, tables).flatten()
        counts = torch.bincount(counts[counts >= 0].long(), minlength=8)[[0, 2, 4, 7]]
        assert counts.sum() == tokens
        allowed = 2 if step == 1 else 1 + math.log2(tokens)  # by chance: sqrt(tokens) / 2
        assert (counts - tokens / 4).abs().max() <= allowed, counts


def test_ranks_with_a_token_each_choose_different_copies(tables):
    """A decode step: otherwise all ranks would go to the first copy."""
    one = torch.zeros(1, 1, dtype=torch.int32)
    chosen = [choose_slots(one, tables, rank=rank, ranks=16).item() for rank in range(16)]
    counts = [chosen.count(slot) for slot in (0, 2, 4, 7)]
    assert max(counts) - min(counts) <= 2


def test_loads_come_out_as_they_were_planned():
    """Routing that is skewed, placed by its own loads, and sent through the tables."""
    E, K, R = 64, 4, 8
    _, ids = tmoe.simulate_routing(8192, E, K, distribution="skewed", skew=1.2)
    loads = torch.bincount(ids.flatten(), minlength=E)
    placement = balance(loads, R, redundant=2)
    chosen = choose_slots(ids, ReplicaTables.of(placement))
    got = torch.bincount(chosen.flatten().long() // placement.counts[0], minlength=R)
    assert got.max() / got.double().mean() < 1.02
    even = torch.bincount(ids.flatten().long() // (E // R), minlength=R)
    assert even.max() / even.double().mean() > 1.3  # what it would be without


def test_nothing_to_choose(tables):
    assert choose_slots(torch.zeros(0, 3, dtype=torch.int32), tables).shape == (0, 3)


def test_bad_input_is_named(tables):
    with pytest.raises(ValueError, match="topk_ids must be of shape"):
        choose_slots(torch.zeros(3), tables)
    with pytest.raises(ValueError, match="rank must be 0 to 1, got 2"):
        choose_slots(torch.zeros(1, 1), tables, rank=2, ranks=2)
