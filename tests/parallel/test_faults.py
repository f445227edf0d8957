"""What doesn't fit is an error that names rank and mismatch; never a hang or a wrong sum."""

import pytest

from tests.parallel import fault_ranks
from tests.parallel.ranks import ranks
from tmoe.parallel import Placement

MISMATCHES = {
    "hidden size": "hidden_size is 64 on rank 0, 2, 3 and 32 on rank 1",
    "dtype": 'dtype of x is "float32" on rank 0, 2, 3 and "bfloat16" on rank 1',
    "scheme": 'scheme is "bf16" on rank 0, 2, 3 and "mxfp4_a16" on rank 1',
    "top_k": "top_k is 2 on rank 0, 2, 3 and 3 on rank 1",
    "activation": "name='geglu', alpha=1.0, limit=inf)\" on rank 1",
    "bias": "bias is false on rank 0, 2, 3 and true on rank 1",
    "placement": "placement is ",
    "exchange": 'exchange is "all_gather" on rank 0, 2, 3 and "all_to_all" on rank 1',
    "version": 'and "0.0.1" on rank 1',
    "gradients": 'gradients is "none" on rank 0, 2, 3 and "tokens, weights" on rank 1',
    "gradients of some": 'is "tokens, weights" on rank 0, 2, 3 and "weights" on rank 1',
    "deterministic": "deterministic is false on rank 0, 2, 3 and true on rank 1",
    "capacity": "capacity is 3 on rank 0, 2, 3 and 4 on rank 1",
    "adapters": 'adapters is {} on rank 0, 2, 3 and {"gate_up_proj": [2, 32',
    "sums": 'sums is "torch.float32" on rank 0, 2, 3 and "torch.bfloat16" on rank 1',
    "experts that are trained": 'gradients is "none" on rank 0, 2, 3 and "experts" on rank 1',
    "fixed number of tokens": "tokens is 4 on rank 0, 2, 3 and 5 on rank 1",
    "the same tokens": "bring as many: rank 1 has 5, another 4",
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_differ_are_told_how(four, what):
    """On every rank, before a token is sent: the group computes the right thing right after it."""
    for kind, text in four.run(fault_ranks.mismatch, what):
        assert kind == "RankMismatchError" and MISMATCHES[what] in text, text


@pytest.mark.parametrize("what", fault_ranks.REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_sent(four, what):
    """EP05, SH01: rank 0 asks alone, and is told at once."""
    kind, text = four.run(fault_ranks.refused, what)[0]
    assert kind == ("TypeError" if what in ("no mesh", "an int") else "ValueError")
    assert fault_ranks.REFUSED[what] in text, text


def test_a_mesh_of_some_ranks(four):
    """EP13: sizes are the group's own."""
    found = four.run(fault_ranks.sub_group)
    assert found == [((0, 1), 0), ((0, 1), 1), ((2, 3), 0), ((2, 3), 1)]


SECONDS = 3


@pytest.mark.parametrize(
    "when, exchange", [("before", "all_gather"), ("in the call", "all_to_all")]
)
def test_a_killed_rank_is_named_on_all_others(when, exchange):
    """EP11, in time; with the step."""
    with ranks(3, seconds=SECONDS) as three:
        first, second, (_, third) = three.answers(fault_ranks.killed, when, exchange)
    assert third == "died"
    for (kind, text, seconds), error in (first, second):
        assert error is None and kind == "RankLostError", text
        step = "number of tokens" if when == "before" else "sending sums back"
        assert step in text and "ranks 0, 1, 2 (gloo) failed on rank" in text, text
        assert "2 is gone or elsewhere" in text, text
        assert seconds < 2 * SECONDS


@pytest.mark.parametrize("exchange, step", [
    ("all_gather", "adding up what experts say"), ("all_to_all", "sending sums back"),
])  # fmt: skip
def test_a_rank_killed_in_backward_is_named(exchange, step):
    with ranks(3, seconds=SECONDS) as three:
        *others, (_, third) = three.answers(fault_ranks.killed_in_backward, exchange)
    assert third == "died"
    for (kind, text, seconds), error in others:
        assert error is None and kind == "RankLostError", text
        assert f"the gradient of {step} of ranks 0, 1, 2" in text, text
        assert "2 is gone or elsewhere" in text and seconds < 2 * SECONDS, text


def test_a_rank_killed_before_groups_are_made_is_named():
    """torch would wait as long as the store does, five minutes, and name nobody."""
    with ranks(4, seconds=SECONDS) as four:
        *others, (_, fourth) = four.answers(fault_ranks.killed_at_init)
    assert fourth == "died"
    for (kind, text, seconds), error in others:
        assert error is None and kind == "RankLostError" and seconds < 3 * SECONDS, text
        assert "is at making a group of ranks; rank 3 didn't come to it within 0:00:03" in text


def test_ranks_at_different_calls_are_told_who_is_where():
    with ranks(2, seconds=SECONDS) as two:
        for kind, text, seconds in two.run(fault_ranks.different_calls):
            assert kind == "RankLostError" and seconds < 2 * SECONDS
            assert "rank 0 at asking for the number of tokens" in text, text
            assert "rank 1 at the start of experts" in text, text


@pytest.mark.parametrize(
    "held, words",
    [
        (((0, 1), (3,)), r"a place for each of 4 experts, got none for \[2\]"),
        (((0, 1, 2, 3), ()), "ranks\\[1\\] must be at least one expert"),
        (((0, 1, 2), (3, 3)), r"experts of which each is there once, got twice: \[3\]"),
        (((0, 1), (2, 4)), r"experts within \[0, 4\), got \[4\]"),
    ],
)
def test_experts_on_no_rank_are_refused(held, words):
    with pytest.raises(ValueError, match=words):
        Placement(4, held)
