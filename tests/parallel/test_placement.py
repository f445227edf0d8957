"""Which rank holds which experts: counts, replicas, and what is refused before anything is sent."""

import pytest

from tmoe.parallel import Placement


def test_contiguous_counts_differ_by_one_at_most_EP05():
    placement = Placement.contiguous(10, 4)
    assert placement.ranks == ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
    assert placement.counts == (3, 3, 2, 2)
    assert placement.first_slots == (0, 3, 6, 8)
    assert placement.in_order and not placement.has_replicas
    assert Placement.contiguous(6, 2).ranks == ((0, 1, 2), (3, 4, 5))
    assert Placement.contiguous(3, 3).counts == (1, 1, 1)


def test_replicas_have_a_slot_on_each_of_their_ranks():
    placement = Placement(4, ((0, 1, 2), (3, 0)))
    assert placement.slot_experts == (0, 1, 2, 3, 0)
    assert placement.slot_ranks == (0, 0, 0, 1, 1)
    assert placement.expert_slots == ((0, 4), (1,), (2,), (3,))
    assert placement.num_slots == 5 and placement.has_replicas and not placement.in_order
    assert Placement.from_slots(4, [0, 1, 2, 3, 0], [3, 2]) == placement


def test_equal_placements_are_one_key():
    first, second = Placement(3, ((2, 0), (1,))), Placement(3, [[2, 0], [1]])
    assert first == second and hash(first) == hash(second)
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != Placement(3, ((0, 2), (1,))).fingerprint
    assert str(first) == "Placement of 3 experts on 2 ranks: 2 0 | 1"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement(3, ((0,), (2,))), r"a place for each of 3 experts, got none for \[1\]"),
        (lambda: Placement(2, ((0, 1), (2,))), r"ranks\[1\] must be experts within \[0, 2\)"),
        (lambda: Placement(2, ((0, 0), (1,))), r"each is there once, got twice: \[0\]"),
        (lambda: Placement(2, ((0, 1), ())), r"ranks\[1\] must be at least one expert"),
        (lambda: Placement(0, ()), "num_experts must be at least 1, got 0"),
        (lambda: Placement.contiguous(3, 4), "num_ranks must be at most the 3 experts"),
        (lambda: Placement.contiguous(3, 0), "num_ranks must be at least 1, got 0"),
        (lambda: Placement.from_slots(2, [0, 1], [1]), "as many in all as slot_experts, 2"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="num_experts must be a int"):
        Placement("4", ((0,),))
    with pytest.raises(TypeError, match=r"ranks\[0\] must be a int"):
        Placement(1, ((0.0,),))
