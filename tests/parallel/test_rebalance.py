"""Experts move between ranks bit by bit, or not at all; every token before and after is right."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.parallel import rebalance_ranks
from tests.parallel.ranks import ranks
from tmoe.parallel import Placement, balance, rebalance
from tmoe.parallel.rebalance_moves import Move, plan_moves
from tmoe.parallel.rebalance_transfer import extra_bytes


@pytest.mark.parametrize(
    "kind", ["fp32", "bf16", "transposed", "inference", *rebalance_ranks.SCHEMES]
)
def test_weights_arrive_bit_by_bit(four, kind):
    """In place, so that nothing has to be allocated anew; and with the memory that was said, and
    some kilobytes for words between ranks."""
    answers = four.run(rebalance_ranks.move, kind)
    assert sum(found["moved"] for found in answers) > 4
    for found in answers:
        assert found["right"] and found["in place"] and found["right again"]
        most, allowed = found["memory"]
        assert 0 < allowed <= most <= allowed + 2**13


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("shape, scheme", [((4,), None), ((2, 2), None), ((4,), "fp8_channel")])
def test_tokens_are_right_before_and_after(four, shape, exchange, scheme):
    """Each rank with tokens of its own, some experts on several; beside the whole layer."""
    for found in four.run(rebalance_ranks.model, shape, exchange, scheme):
        assert found["sent"] > 0 and found["placement"]
        for name in ("before", "after"):
            if scheme is None:
                assert_matches(found[name], found["truth"], found["whole"])
            else:
                torch.testing.assert_close(found[name], found["whole"])


@pytest.mark.parametrize(
    "name, kind, words",
    [
        ("another placement", "RankMismatchError", "new placement is "),
        ("another layer", "RankMismatchError",
         'layer is "a layer" on rank 0, 1, 3 and "layers.4" on rank 2'),
        ("another dtype", "RankMismatchError",
         'format of down_proj is "plain float32" on rank 0, 1, 3 and "plain bfloat16" on rank 2'),
        ("another size", "RankMismatchError",
         "size of down_proj is [64, 32] on rank 0, 1, 3 and [64, 16] on rank 2"),
        ("too little memory", "ValueError", "rank 2: move_experts: max_extra_bytes must be at"),
        ("fewer slots", "ValueError",
         "rank 2: move_experts: tensors['down_proj'] must be of 3 slots first, got (2, 64, 32)"),
        ("no memory", "RuntimeError", "rank 2: can't set aside memory for"),
        ("another number of ranks", "ValueError", "rank 0: move_experts: old must be of 4 ranks"),
    ],
)  # fmt: skip
def test_what_one_rank_cannot_do_none_does(four, name, kind, words):
    """The same error on all ranks, with the number of the one, and nothing has changed anywhere."""
    errors = four.run(rebalance_ranks.refused, name)
    assert len({(kind, text.replace("layers.4:", "a layer:")) for kind, text, _ in errors}) == 1
    assert errors[0][0] == kind and words in errors[0][1], errors[0][1]
    assert "the old placement stays" in errors[0][1]
    assert all(untouched for *_, untouched in errors)


@pytest.mark.parametrize(
    "why, words",
    [
        ("training", "down_proj, gate_up_proj_bias, down_proj_bias are in training"),
        ("gradients", "rank 1: down_proj are in training: an optimizer's state"),
        ("captured", "rank 1: it was captured in a CUDA graph"),
    ],
)
def test_training_and_captured_layers_are_refused(four, why, words):
    for text in four.run(rebalance_ranks.not_now, why):
        assert words in text


def test_a_group_of_some_ranks(four):
    """EP13: sizes and ranks are the group's own."""
    assert four.run(rebalance_ranks.subgroup) == [None, True, None, True]


@pytest.mark.parametrize("when, words", [
    ("before", "rank 1 didn't come to it within"),
    ("in the exchange", "the exchange of ranks 0, 1 (gloo) failed on rank 0: rank 1 is gone"),
])  # fmt: skip
def test_a_rank_that_dies_is_an_error_and_the_old_placement_stays(when, words):
    """EP11: in time, with the step and who is gone."""
    with ranks(2, seconds=3) as two:
        (first, _), (_, second) = two.answers(rebalance_ranks.lose_a_rank, when)
    kind, text, untouched = first
    assert second == "died" and kind == "RankLostError" and untouched
    assert words in text and "layers.7" in text and "the old placement stays" in text


def test_what_is_no_layer_of_several_ranks_is_refused():
    layer = rebalance_ranks.layer()
    with pytest.raises(ValueError, match="model must be one with layers that parallelize made"):
        rebalance(layer, Placement.contiguous(10, 2))


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
