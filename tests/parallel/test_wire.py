"""What goes over the wire: how many bytes, in which format; no bit of a result hangs on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parallel.cases import Case
from tests.parallel.wire_ranks import (
    coded,
    goes_once,
    overflowing,
    trained_with_sums,
    with_sums,
)
from tmoe.formats import SCHEMES
from tmoe.kernels.exchange_ref import Parts
from tmoe.parallel.choose import ExchangeProblem, choose
from tmoe.parallel.messages import packed

H = 256
BASE = Case(
    "", (2,), ("x",), (5, 5), ep="x", dp="x", hidden=H, intermediate=256, experts=4, grads=False,
    dtype=torch.bfloat16,
)  # fmt: skip
# Of a token of H numbers, as its scheme's inputs are: codes, and scales that are its own.
BYTES = {
    "fp8_tensor": H,
    "fp8_channel": H + 4,
    "fp8_block": H + 4 * (H // 128),
    "mxfp8": H + H // 32,
    "mxfp4_a8": H + H // 32,
    "nvfp4": H // 2 + H // 16,
    "bf16": 2 * H,
}


def message(token_bytes: int, scale_bytes: int, top_k: int = 2) -> int:
    """A row: parts at multiples of 32 bytes, all of them at one of 128."""
    parts = (token_bytes, scale_bytes, 4 * top_k, 4 * top_k)
    return -(-sum(-(-part // 32) * 32 for part in parts) // 128) * 128


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("scheme", [name for name, s in SCHEMES.items() if s.inputs])
def test_tokens_are_quantised_before_they_are_sent(two, scheme, exchange):
    """EP12, and the same bits as quantising afterwards: every row keeps the scale it would have."""
    case = replace(BASE, scheme=scheme, exchange=exchange)
    codes = H // 2 if scheme == "nvfp4" else H
    now, plain = message(codes, BYTES[scheme] - codes), message(2 * H, 0)
    back = 4 * H if exchange == "all_to_all" else 0  # sums, in float32; reduced in the other one
    for found in two.run(coded, case):
        assert found["codes"]
        assert torch.equal(found["before"], found["after"])
        assert found["before sent"] == 5 * (now + back) < found["after sent"] == 5 * (plain + back)


def test_slot_by_slot_codes_are_the_same_ones(two):
    case = replace(BASE, scheme="fp8_block", exchange="all_to_all", deterministic=True)
    for found in two.run(coded, case):
        assert torch.equal(found["before"], found["after"]) and found["before"].abs().max() > 0


def test_scales_of_experts_are_not_for_tokens(two):
    """An expert's own static scale makes a token's codes differ from expert to expert."""
    case = replace(BASE, scheme="fp8_tensor", of_experts=True, exchange="all_to_all")
    for found in two.run(coded, case):
        assert not found["codes"] and found["before sent"] == found["after sent"]


def test_a_token_goes_to_a_rank_once(two):
    """Whatever its number of experts there; exact calls have no padding, and own rows stay."""
    for rank, (sent, size, steps) in enumerate(two.run(goes_once, False)):
        away, come = (4, 2) if rank == 0 else (2, 4)  # to the other rank, and from it
        assert sent == away * size + come * 16 * 4
        assert steps == ["sending tokens", "sending sums back"]
    for sent, size, steps in two.run(goes_once, True):  # the capacity, used or not
        assert sent == 4 * size + 4 * 16 * 4 and len(steps) == 2


def test_what_does_not_fit_is_counted(two):
    """EP14: a limit is an option, and reports what it dropped."""
    for counts, said in two.run(overflowing):
        assert counts == [4, 8, 0]
        assert "8 rows of Experts didn't fit into the capacity" in said


def test_sums_in_bfloat16_are_asked_for(two):
    wide, narrow = two.run(with_sums, torch.float32), two.run(with_sums, torch.bfloat16)
    for usual, found in zip(wide, narrow, strict=True):
        assert found["chosen"] == "all_to_all" and found["sent"] > 0
        assert "all_gather        no   its sums would be added up in 16 bits" in found["said"]
        assert "16-bit sums" in found["said"] and "16-bit" not in usual["said"]
        assert found["off"] <= 2 * found["one"]


def test_sums_in_bfloat16_are_added_up_in_float32_with_gradients(two):
    for off, one, has_grad in two.run(trained_with_sums):
        assert off <= 2 * one and has_grad


def problem(**changes) -> ExchangeProblem:
    usual = {
        "tokens": 1024, "hidden": 4096, "top_k": 8, "row_bytes": 8192, "sum_bytes": 4,
        "wide_bytes": 4, "owners": 8, "shares": 1, "width": 1,
    }  # fmt: skip
    return ExchangeProblem(**{**usual, **changes})


def test_no_tokens_with_any_strides():
    """torch calls every tensor without numbers contiguous, and won't view some as bytes."""
    odd = torch.empty_strided((0, 1), (1, 0))
    got = packed(Parts(torch.empty(0, 8), None, odd.int(), odd))
    assert got.shape == (0, message(32, 0, 1)) and got.dtype == torch.uint8


def test_the_shorter_exchange_is_chosen():
    """Few tokens of few ranks go everywhere; many, over many ranks, where they are wanted; on one
    host, as far as there is room for them, straight into the other GPUs' memory."""
    few = choose(problem(tokens=1, owners=2, fixed=True, no_peers="there is no NVLink"))
    assert few.chosen == "all_gather"
    assert choose(problem(tokens=1, fixed=True)).chosen == "symmetric_memory"
    assert choose(problem(tokens=4096)).chosen == "symmetric_memory"
    assert choose(problem(tokens=8192)).chosen == "all_to_all"
    many = choose(problem(tokens=8192, owners=64, nodes=8))
    assert many.chosen == "all_to_all"
    assert [c.name for c in many.candidates][:2] == ["all_to_all", "all_gather"]
    assert "about" in str(many) and "links" in str(many)


def test_what_cannot_be_is_said():
    alone = problem(owners=1, width=2)
    assert choose(alone).chosen == "all_gather"
    with pytest.raises(ValueError, match=r"experts aren't divided among ranks \(ep 1\)"):
        choose(alone, "all_to_all")
    with pytest.raises(
        ValueError, match="exchange must be None or one of all_gather, all_to_all, sym"
    ):
        choose(problem(), "broadcast")
