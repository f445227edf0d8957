"""A token's replica of an expert: always the same one, and all replicas used evenly."""

from __future__ import annotations

import math

import pytest
import torch

import tmoe
from tmoe.parallel import Placement
from tmoe.parallel.balance import balance
from tmoe.parallel.exchange_steps import place_tokens
from tmoe.parallel.routes import slots_on

PLACEMENT = Placement(4, ((0, 1), (0, 2), (0, 3), (1, 0)))  # expert 0 is everywhere, 1 on two
SLOTS_OF_0 = [0, 2, 4, 7]


def chosen_slots(ids, placement):
    """Of tokens that are numbered from 0."""
    slots = slots_on(placement, ids.device)
    return place_tokens(ids, slots, own=0, capacity=0, first_turn=0, dropped=None).slots


def test_a_slot_holds_the_expert_that_was_chosen():
    _, ids = tmoe.simulate_routing(500, 4, 2, distribution="skewed", skew=1.2)
    ids[::7] = -1
    ids[3, 0] = 4  # a sentinel
    chosen = chosen_slots(ids, PLACEMENT)
    experts = torch.tensor(PLACEMENT.slot_experts)
    real = (ids >= 0) & (ids < 4)
    assert torch.equal(chosen >= 0, real)
    assert torch.equal(experts[chosen[real].long()], ids[real].long())
    assert torch.equal(chosen, chosen_slots(ids.long(), PLACEMENT))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 8])
def test_replicas_are_used_evenly(step):
    """Also where every other token, or every fourth, chose the expert: a remainder would not."""
    for tokens in (4, 16, 101, 4096):
        ids = torch.full((tokens * step, 1), -1)
        ids[::step] = 0
        counts = chosen_slots(ids, PLACEMENT).flatten()
        counts = torch.bincount(counts[counts >= 0].long(), minlength=8)[SLOTS_OF_0]
        assert counts.sum() == tokens
        allowed = 2 if step == 1 else 1 + math.log2(tokens)  # by chance: sqrt(tokens) / 2
        assert (counts - tokens / 4).abs().max() <= allowed, counts


def test_ranks_with_a_token_each_choose_different_replicas():
    """A decode step, where a token's number is that of its rank."""
    chosen = chosen_slots(torch.zeros(16, 1, dtype=torch.int32), PLACEMENT)
    counts = torch.bincount(chosen.flatten(), minlength=8)[SLOTS_OF_0]
    assert counts.max() - counts.min() <= 2


def test_loads_come_out_as_they_were_planned():
    """Routing that is skewed, placed by its own loads, and sent to slots."""
    E, K, R = 64, 4, 8
    _, ids = tmoe.simulate_routing(8192, E, K, distribution="skewed", skew=1.2)
    placement = balance(torch.bincount(ids.flatten(), minlength=E), R, redundant=2)
    chosen = chosen_slots(ids, placement)
    got = torch.bincount(chosen.flatten().long() // placement.counts[0], minlength=R)
    assert got.max() / got.double().mean() < 1.02
    even = torch.bincount(ids.flatten().long() // (E // R), minlength=R)
    assert even.max() / even.double().mean() > 1.3  # what it would be without
