"""Placement by load: every expert somewhere, exact slots, loads near the bound, always the same."""

from __future__ import annotations

import itertools

import pytest
import torch

import tmoe
from tmoe.bench.loads import chances
from tmoe.parallel.balance import (
    balance,
    balance_groups,
    heaviest,
    rank_loads,
    replicate,
    slot_counts,
)
from tmoe.parallel.placement import Placement

contiguous = Placement.contiguous

SIZES = [(8, 4, 0), (8, 4, 2), (10, 4, 0), (10, 4, 1), (7, 3, 2), (16, 16, 3), (5, 1, 0), (6, 6, 5)]


def random_loads(count, seed, kind="zipf"):
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=random)
    if kind == "zipf":
        return [1000.0 / (1 + place) ** 1.2 for place in order.tolist()]
    return torch.rand(count, generator=random, dtype=torch.float64).tolist()


def check(placement, num_experts, ranks, redundant):
    """That every expert is there, and copies are on different ranks, `Placement` checks itself."""
    assert placement.num_experts == num_experts
    assert [*placement.counts] == slot_counts(num_experts, ranks, redundant)


def best_possible(loads, ranks, redundant):
    """The smallest largest load over every placement there is."""
    room = slot_counts(len(loads), ranks, redundant)
    choices = [[*itertools.combinations(range(len(loads)), count)] for count in room]
    found = float("inf")
    for slots in itertools.product(*choices):
        if {e for own in slots for e in own} == {*range(len(loads))}:
            found = min(found, heaviest(loads, Placement(len(loads), slots)))
    return found


@pytest.mark.parametrize("kind", ["zipf", "uniform"])
@pytest.mark.parametrize("E, R, r", SIZES)
def test_every_expert_has_a_place_and_every_slot_an_expert(E, R, r, kind):
    for seed in range(10):
        loads = random_loads(E, seed, kind)
        slots = balance(loads, R, redundant=r)
        check(slots, E, R, r)
        assert slots == balance(torch.tensor(loads, dtype=torch.float64), R, redundant=r)
        assert heaviest(loads, slots) <= heaviest(loads, contiguous(E, R)) * (1 + 1e-12)


@pytest.mark.parametrize("E, R, r", [(6, 2, 0), (6, 3, 0), (7, 3, 0), (6, 2, 1), (6, 3, 1)])
def test_the_largest_load_is_near_that_of_all_placements(E, R, r):
    """Compared with trying all of them. Without copies what is left is what exchanges of two can't
    find; with few copies, that a copy may be of the wrong expert. Real sizes come closer, below."""
    ratios = []
    for seed, kind in itertools.product(range(8), ("zipf", "uniform")):
        loads = random_loads(E, seed, kind)
        ratios.append(heaviest(loads, balance(loads, R, redundant=r)) / best_possible(loads, R, r))
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) < (1.2 if r else 1.1)
    assert sum(ratios) / len(ratios) < (1.04 if r else 1.01)


def test_copies_are_the_best_there_are():
    """No other numbers of copies have a smaller largest load of a slot."""
    for seed in range(20):
        loads = random_loads(5, seed)
        ours = replicate(loads, 8, 3)
        others = [n for n in itertools.product(range(1, 4), repeat=5) if sum(n) == 8]
        best = min(max(load / n for load, n in zip(loads, own, strict=True)) for own in others)
        assert sum(ours) == 8 and max(ours) <= 3
        assert max(load / n for load, n in zip(loads, ours, strict=True)) == best


def test_a_popular_expert_gets_copies_on_different_ranks():
    loads = [80, 1, 1, 1, 1, 1, 1, 1]
    placement = balance(loads, 4, redundant=1)
    assert sum(0 in own for own in placement.ranks) == 4
    assert rank_loads(loads, placement) == pytest.approx([21.75] * 4, abs=0.5)


@pytest.mark.parametrize("E, R, r", [(256, 8, 0), (256, 64, 1), (384, 32, 2), (10, 4, 1)])
def test_no_placement_is_much_better(E, R, r):
    """Whatever the placement, some rank has the mean, and some slot the largest share of all."""
    for seed, kind in itertools.product(range(3), ("zipf", "uniform")):
        loads = random_loads(E, seed, kind)
        copies = replicate(loads, sum(slot_counts(E, R, r)), R)
        share = max(load / n for load, n in zip(loads, copies, strict=True))
        bound = max(sum(loads) / R, share)
        assert bound * (1 - 1e-9) <= heaviest(loads, balance(loads, R, redundant=r)) < 1.16 * bound


def test_skewed_models_come_close_to_even():
    """256 experts of popularity r^-1.2 on 32 ranks: what copies are for."""
    loads = chances(256, 8, "zipf")
    mean = sum(loads) / 32
    without = heaviest(loads, balance(loads, 32)) / mean
    one_copy = heaviest(loads, balance(loads, 32, redundant=1)) / mean
    assert heaviest(loads, contiguous(256, 32)) / mean > 8  # popular ones are neighbours here
    assert 3.5 < without < 4.1 and one_copy < 1.02  # the first expert alone is 4 ranks' share


def test_what_nobody_chose_counts_too():
    check(balance([0, 0, 0, 0, 0], 2, redundant=1), 5, 2, 1)
    check(balance([0, 7, 0, 0, 0], 5, redundant=4), 5, 5, 4)


def test_recorded_loads_are_taken_as_they_are():
    load = tmoe.ExpertLoad(num_experts=4)
    load.add_ids(torch.tensor([[0, 1], [0, 2], [0, 3]]))
    assert balance(load, 2) == balance([3, 1, 1, 1], 2)


def test_groups_stay_inside_a_node():
    loads = random_loads(64, 3)
    slots = balance_groups(loads, 8, groups=8, nodes=4, redundant=1)
    check(slots, 64, 8, 1)
    node_of_group = {}
    for rank, own in enumerate(slots.ranks):
        for expert in own:
            assert node_of_group.setdefault(expert // 8, rank // 2) == rank // 2
    assert sorted(node_of_group.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    flat = balance(loads, 8, redundant=1)
    assert heaviest(loads, flat) <= heaviest(loads, slots) < heaviest(loads, contiguous(64, 8))


@pytest.mark.parametrize("groups", [None, 4])
def test_what_is_there_already_stays(groups):
    """The same loads again move nothing; changed ones move less than without `current`."""

    def place(loads, current=None):
        if groups is None:
            return balance(loads, 8, redundant=2, current=current)
        return balance_groups(loads, 8, groups=4, nodes=2, redundant=2, current=current)

    def moved(old, new):
        return sum(a != b for a, b in zip(old.slot_experts, new.slot_experts, strict=True))

    before = random_loads(32, 0)
    first = place(before)
    assert place(before, first) == place(before, place(before, first)) == first
    shuffled = Placement(32, tuple(reversed(first.ranks)))
    assert place(before, first) != place(before, shuffled)
    assert moved(shuffled, place(before, shuffled)) == 0
    after = [load * (1 + place % 3) for place, load in enumerate(before)]
    near, far = place(after, first), place(after)
    check(near, 32, 8, 2)
    assert heaviest(after, near) == pytest.approx(heaviest(after, far))
    assert moved(first, near) < moved(first, far)


@pytest.mark.parametrize(
    "words, call",
    [
        ("balance: loads[1] must be finite and at least 0, got -1.0", lambda: balance([1, -1], 1)),
        ("loads[0] must be finite and at least 0, got nan", lambda: balance([float("nan")], 1)),
        ("ranks must be 1 to 3, the number of experts, got 4", lambda: balance([1, 1, 1], 4)),
        ("redundant must be 0 to 2: 4 experts over 2 ranks",
         lambda: balance([1] * 4, 2, redundant=3)),
        ("current must be of [2, 2] slots per rank, got [1, 3]",
         lambda: balance([1] * 4, 2, current=Placement(4, ((0,), (1, 2, 3))))),
        ("current must be of 4 experts, got Placement of 5 experts",
         lambda: balance([1] * 4, 2, current=contiguous(5, 2))),
        ("loads must be of shape (E,), got (2, 2)", lambda: balance(torch.ones(2, 2), 2)),
        ("nodes must be a divisor of groups=4",
         lambda: balance_groups([1] * 8, 6, groups=4, nodes=3)),
        ("groups must be a divisor of 8 experts, got 3",
         lambda: balance_groups([1] * 8, 2, groups=3, nodes=1)),
        ("nodes must be a divisor of ranks=3",
         lambda: balance_groups([1] * 8, 3, groups=4, nodes=2)),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(words, call):
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value)
