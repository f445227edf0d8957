"""Experts move between ranks bit by bit, or not at all; every token before and after is right."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.parallel import rebalance_ranks
from tests.parallel.rank_processes import run_ranks
from tmoe.parallel.balance import balance
from tmoe.parallel.placement import Placement
from tmoe.parallel.rebalance import extra_bytes, move_experts
from tmoe.parallel.rebalance_moves import Move, plan_moves


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of four ranks found; all in one start, which is what takes the time."""
    return run_ranks(rebalance_ranks.scenarios, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "transposed", *rebalance_ranks.SCHEMES])
def test_weights_arrive_bit_by_bit_and_in_place(ranks, kind):
    assert all(found[kind]["right"] for found in ranks)
    assert all(found[kind]["in place"] for found in ranks)  # so that CUDA graphs stay right
    assert sum(found[kind]["moved"] for found in ranks) > 4


@pytest.mark.parametrize("kind", ["fp32", "transposed", "fp8_block"])
def test_memory_is_what_was_said(ranks, kind):
    """And some kilobytes for words between the ranks; a rank's whole experts would be more."""
    for found in ranks:
        most, allowed = found[kind]["memory"]
        assert 0 < allowed <= most + 1 and most <= allowed + 2**13


def test_tokens_are_right_before_and_after(ranks):
    """Over four ranks, some experts on several, against one process with all of them."""
    experts = rebalance_ranks.all_experts("fp32")
    x, weights, ids = rebalance_ranks.tokens()
    arguments = experts["gate_up_proj"], experts["down_proj"], weights, ids
    single = tmoe.fused_experts(x, *arguments)
    truth = tmoe.fused_experts(*(value.double() if value.is_floating_point() else value
                                 for value in (x, *arguments)))  # fmt: skip
    bound = 2 * (single.double() - truth).abs().max()
    for found in ranks:
        for output in found["outputs"]:
            assert (output.double() - truth).abs().max() <= bound


def test_it_can_go_back(ranks):
    assert all(found["right again"] and found["back"] > 0 for found in ranks)


@pytest.mark.parametrize(
    "name, kind, words",
    [
        ("another placement", "ValueError", "rank 2 must have {'new': "),
        ("another dtype", "ValueError",
         "rank 2 must have {'down_proj': ['plain', 'torch.float32 (64, 32)']}"),
        ("gradients", "ValueError", "rank 2: move_experts: tensors['down_proj'] must be without"),
        ("too little memory", "ValueError", "rank 2: move_experts: max_extra_bytes must be at"),
        ("other sizes", "ValueError",
         "rank 2: move_experts: tensors['down_proj'] must be of 3 slots first, got (2, 64, 32)"),
        ("no memory", "RuntimeError", "rank 2: can't set aside memory for"),
        ("another number of ranks", "ValueError", "rank 0: move_experts: old must be of 4 ranks"),
    ],
)  # fmt: skip
def test_what_one_rank_cannot_do_none_does(ranks, name, kind, words):
    """The same error on all ranks, with the number of the one, and nothing has changed anywhere."""
    errors = [found["errors"][name] for found in ranks]
    assert len({(kind, text) for kind, text, _ in errors}) == 1
    assert errors[0][0] == kind and words in errors[0][1], errors[0][1]
    assert "the old placement stays" in errors[0][1]
    assert all(untouched for *_, untouched in errors)


def test_a_group_of_some_ranks(ranks):
    """EP13: sizes are the group's own, and who isn't a member is told so."""
    assert ranks[1]["subgroup"] is True and ranks[3]["subgroup"] is True
    assert "group must be one that this rank is a member of, got rank 2" in ranks[2]["subgroup"]


def test_a_rank_that_dies_is_an_error_and_the_old_placement_stays(tmp_path):
    """EP11: in time, with the name of the step and of the ranks that were waited for."""
    (text, untouched), _ = run_ranks(rebalance_ranks.lose_a_rank, 2, tmp_path, killed=(1,))
    assert "rank 0 waited for experts to or from ranks 1" in text and untouched
    assert "the old placement stays" in text


def test_without_ranks_there_is_an_error():
    placement = Placement.contiguous(4, 1)
    with pytest.raises(ValueError, match="group must be initialized"):
        move_experts({"w": torch.zeros(4, 2)}, placement, placement)


def test_moves_are_those_that_are_needed():
    old = Placement(4, ((0, 1), (2, 3), (0, 2)))
    new = Placement(4, ((0, 3), (3, 2), (0, 1)))
    moves = plan_moves(old, new)
    assert moves.moves == (
        Move(3, 1, 1, 0, 1),
        Move(3, 1, 1, 1, 0),  # within rank 1
        Move(2, 1, 0, 1, 1),
        Move(1, 0, 1, 2, 1),
    )
    assert moves.sent == 2 and not plan_moves(old, old).moves
    assert str(moves) == "4 slots of 3 ranks change, at most 2 of one; 2 experts are sent"
    tensors = {"w": torch.zeros(2, 5), "q": tmoe.quantize(torch.ones(2, 16, 32), "nvfp4")}
    one = 5 * 4 + 16 * 16 + 16 * 2 + 4  # fp32; codes, scales and the global scale
    assert [extra_bytes(tensors, moves, rank) for rank in range(3)] == [one, 2 * one, one]


def test_senders_are_near_and_take_turns():
    old = Placement(6, ((0, 1), (0, 2), (0, 3), (0, 4), (5, 1), (5, 2)))
    new = Placement(6, ((5, 1), (5, 2), (0, 3), (0, 4), (0, 1), (0, 2)))
    sources = [move.source for move in plan_moves(old, new).moves]
    assert sources == [4, 5, 0, 1]  # nobody sends twice
    near = [move.source for move in plan_moves(old, new, nodes=[0, 0, 1, 1, 1, 1]).moves]
    assert near == [4, 5, 2, 3]


def test_other_counts_of_slots_are_refused():
    with pytest.raises(
        ValueError, match=r"new must be of \[2, 2\] slots per rank, as old, got \[3"
    ):
        plan_moves(Placement.contiguous(4, 2), Placement(4, ((0, 1, 2), (3,))))
    with pytest.raises(ValueError, match="new must be of 4 experts, as old, got 5"):
        plan_moves(Placement.contiguous(4, 2), Placement.contiguous(5, 2))
    with pytest.raises(ValueError, match="nodes must be of 2 ranks, got 1"):
        plan_moves(Placement.contiguous(4, 2), Placement.contiguous(4, 2), nodes=[0])


def test_rebalancing_moves_little_when_loads_change_little():
    before = [1000 / (1 + e) ** 1.2 for e in range(64)]
    first = balance(before, 8, redundant=2)
    after = [load * (1.1 if e % 7 == 0 else 1) for e, load in enumerate(before)]
    second = balance(after, 8, redundant=2, current=first)
    assert plan_moves(first, second).sent < plan_moves(first, balance(after, 8, redundant=2)).sent
