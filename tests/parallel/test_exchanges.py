"""Layers on 2, 3 and 4 ranks give what one rank gives, forward and backward."""

from dataclasses import replace

import pytest
import torch

from tests.parallel import gradient_ranks
from tests.parallel.cases import Case, run
from tmoe.formats import SCHEMES

TP = {"mesh": (2,), "dims": ("x",), "tp": "x"}
EP = {"mesh": (2,), "dims": ("x",), "ep": "x"}
DPEP = {"mesh": (2,), "dims": ("x",), "ep": "x", "dp": "x"}
BOTH = ("all_gather", "all_to_all")

TWO = [
    Case("tp", **TP, tokens=(5,)),
    Case("ep", **EP, tokens=(5,)),
    Case("dp+ep", **DPEP, tokens=(5, 5)),
    Case("uneven tokens", **DPEP, tokens=(7, 3)),
    Case("a rank without tokens", **DPEP, tokens=(0, 4)),
    Case("no tokens at all", **DPEP, tokens=(0, 0)),
    Case("experts not divisible EP05", **DPEP, tokens=(4, 5), experts=7),
    Case("K above experts per rank", **DPEP, tokens=(4, 3), experts=6, top_k=5),
    Case("one expert takes all EP14", **DPEP, tokens=(9, 4), all_to=5),  # EM05: rank 0 gets none
    Case("the first takes all EP14", **DPEP, tokens=(9, 4), all_to=0, top_k=1),
    Case("placed out of order", **DPEP, tokens=(4, 5), placement=((5, 0, 3), (1, 2, 4))),
    Case("uneven placement", **DPEP, tokens=(4, 5), placement=((5,), (0, 3, 1, 2, 4))),
    Case("biases SH10", **TP, tokens=(5,), layer={"bias": True}),
    Case("biases, ep", **DPEP, tokens=(5, 2), layer={"bias": True}),
    Case("shared expert", **DPEP, tokens=(5, 2), layer={"shared_intermediate_size": 10}),
    Case(
        "shared expert, tp", **TP, tokens=(5,),
        layer={"shared_intermediate_size": 10, "shared_expert_gate": True},
    ),
    Case(
        "interleaved, tp", **TP, tokens=(5,),
        layer={"interleaved": True, "bias": True, "activation": "swiglu_oai"},
    ),
    Case("no gate, tp", **TP, tokens=(5,), layer={"activation": "relu2"}),
    Case("odd width SH05", **TP, tokens=(5,), intermediate=33),
    Case("weight on input", **DPEP, tokens=(5, 2), routing="Llama4", top_k=1),
    Case(
        "scaling factor SC05", **DPEP, tokens=(5, 2), routing="MiniMax2",
        numbers={"scaling_factor": 2.5}, layer={"shared_intermediate_size": 10},
    ),
    Case("bf16", **DPEP, tokens=(5, 2), dtype=torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("case", TWO, ids=lambda c: c.why)
def test_two_ranks(two, case, exchange):
    if exchange == "all_to_all" and case.ep is None:
        pytest.skip("experts aren't divided")
    two.run(run, replace(case, exchange=exchange))


FIXED = [
    Case("fixed", **DPEP, tokens=(5, 5), fixed=True),
    Case("fixed, ep", **EP, tokens=(5,), fixed=True),
    Case("fixed, fewer tokens than ranks", **EP, tokens=(1,), fixed=True),
    Case("fixed, no tokens", **DPEP, tokens=(0, 0), fixed=True),
    Case("fixed, every row to one rank", **DPEP, tokens=(6, 6), fixed=True, all_to=0, top_k=1),
    Case("fixed, enough room", **DPEP, tokens=(6, 6), fixed=6, top_k=1, experts=4),
]


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("case", FIXED, ids=lambda c: c.why)
def test_fixed(two, case, exchange):
    two.run(run, replace(case, exchange=exchange))


BITS = [
    Case("dp+ep", **DPEP, tokens=(5, 3), deterministic=True, top_k=4),
    Case("ep", **EP, tokens=(5,), deterministic=True, top_k=4),
    Case(
        "out of order", **DPEP, tokens=(5, 3), deterministic=True,
        placement=((5, 0, 3), (1, 2, 4)),
    ),
    Case("bf16", **DPEP, tokens=(5, 3), deterministic=True, dtype=torch.bfloat16, top_k=4),
    Case(
        "triton", **DPEP, tokens=(5, 3), deterministic=True, top_k=3, backend="triton",
        batch_invariant=True, grads=False,
    ),
    Case(
        "triton bf16", **DPEP, tokens=(5, 3), deterministic=True, top_k=3, backend="triton",
        batch_invariant=True, grads=False, dtype=torch.bfloat16,
    ),
    Case("fixed", **DPEP, tokens=(5, 5), deterministic=True, fixed=True, top_k=4),
]  # fmt: skip


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("case", BITS, ids=lambda c: c.why)
def test_deterministic_is_bit_identical(two, case, exchange):
    for found in two.run(run, replace(case, exchange=exchange)):
        assert found["same_bits"]


def quantized(scheme, **changes):
    """Sizes of two blocks, uneven where a block may be cut short."""
    I = {"fp8_block": 256, "nvfp4": 48, "nvfp4_a16": 48, "fp8_channel": 48}.get(scheme, 96)
    about = {"hidden": 64, "intermediate": I, "experts": 5, "tokens": (4, 3), "backend": "triton"}
    return Case(scheme, **({**DPEP, **about, "scheme": scheme, "grads": False} | changes))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_experts_of_two_ranks(two, scheme):
    exchange = BOTH[list(SCHEMES).index(scheme) % 2]
    two.run(run, quantized(scheme, exchange=exchange))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_width_of_two_ranks(two, scheme):
    two.run(run, quantized(scheme, ep=None, dp=None, tp="x", tokens=(4,)))


@pytest.mark.parametrize("scheme", ["fp8_tensor", "nvfp4"])
def test_static_scales_go_with_their_experts(two, scheme):
    two.run(run, quantized(scheme, of_experts=True, placement=((4, 0), (1, 3, 2))))


THREE = [
    Case(
        "ep 3 of 7 experts", mesh=(3,), dims=("x",), ep="x", dp="x", tokens=(4, 0, 7),
        experts=7, top_k=3,
    ),
    Case(
        "tp 3 of width 13", mesh=(3,), dims=("x",), tp="x", tokens=(4,), intermediate=13,
        layer={"bias": True},
    ),
    Case(  # of expert 0 alone; one rank has none of them
        "copies", mesh=(3,), dims=("x",), ep="x", dp="x", tokens=(6, 3, 4), experts=7, top_k=3,
        placement=((0, 1), (2, 3, 0), (6, 4, 5)), layer={"bias": True},
    ),
    Case(
        "copies, a rank without tokens", mesh=(3,), dims=("x",), ep="x", dp="x", tokens=(6, 0, 4),
        experts=4, top_k=3, placement=((0, 1), (2, 3, 0), (3, 0)),
    ),
    Case(
        "copies, same tokens", mesh=(3,), dims=("x",), ep="x", tokens=(7,), experts=4, top_k=3,
        placement=((3, 1), (2, 3, 0), (3, 2)), layer={"activation": "relu2"},
    ),
    Case("ep 3, same tokens", mesh=(3,), dims=("x",), ep="x", tokens=(4,), experts=7, top_k=3),
]  # fmt: skip
GRID = {"mesh": (2, 2), "dims": ("a", "b")}
FOUR = [
    Case("tp+ep", **GRID, tp="b", ep="a", tokens=(5,), layer={"bias": True}),
    Case(
        "dp+tp+ep", **GRID, tp="b", ep="a", dp="a", tokens=(5, 2),
        layer={"bias": True, "shared_intermediate_size": 10},
    ),
    Case("ep over both, tokens along one", **GRID, ep=("a", "b"), dp="a", tokens=(5, 2)),
    Case("ep over both, one token", **GRID, ep=("a", "b"), dp="a", tokens=(1, 0)),
    Case("ep over both, own tokens", **GRID, ep=("a", "b"), dp=("a", "b"), tokens=(5, 2, 0, 4)),
    Case(
        "tp, copies", **GRID, tp="b", ep="a", dp="a", tokens=(6, 3), top_k=3,
        placement=((0, 1, 2, 3), (3, 4, 5, 0)), layer={"bias": True},
    ),
    Case("replicas of experts along dp", **GRID, ep="b", dp=("a", "b"), tokens=(5, 2)),
]  # fmt: skip


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("case", THREE, ids=lambda c: c.why)
def test_three_ranks(three, case, exchange):
    if exchange == "all_to_all" and case.ep is None:
        pytest.skip("experts aren't divided")
    three.run(run, replace(case, exchange=exchange))


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("case", FOUR, ids=lambda c: c.why)
def test_four_ranks(four, case, exchange):
    four.run(run, replace(case, exchange=exchange))


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("how", [DPEP, EP, TP], ids=["dp+ep", "ep", "tp"])
@pytest.mark.parametrize("scheme", ["fp8_a16", "nvfp4_a16"])
def test_gradients_through_quantised_experts(two, scheme, how, exchange):
    if "ep" not in how and exchange == "all_to_all":
        pytest.skip("experts aren't divided")
    sizes = {"hidden": 64, "intermediate": 64, "tokens": (7, 4) if "dp" in how else (7,)}
    case = Case("", **how, **sizes, scheme=scheme, exchange=exchange)
    two.run(gradient_ranks.through_codes, case)
