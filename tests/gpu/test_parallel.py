"""Two GPUs side by side with one: the same cases as on CPUs, and what only a GPU has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.conftest import NEEDS_TWO
from tests.parallel import gradient_ranks, lora_ranks
from tests.parallel.cases import Case, make_whole, run, spread, tokens_of
from tests.parallel.test_lora import files
from tests.parallel.wire_ranks import coded
from tmoe.parallel import fixed_tokens

pytestmark = [pytest.mark.gpu, NEEDS_TWO]
SIZES = {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4}
BF16 = SIZES | {"dtype": torch.bfloat16, "grads": False}
TP = {"mesh": (2,), "dims": ("x",), "tp": "x"}
EP = {"mesh": (2,), "dims": ("x",), "ep": "x"}
DPEP = {"mesh": (2,), "dims": ("x",), "ep": "x", "dp": "x"}
BOTH = ("all_gather", "all_to_all")

EVERY = [
    Case("bf16", **DPEP, **BF16, tokens=(70, 33)),
    Case("many tokens", **DPEP, **BF16, tokens=(3000, 2000)),
    Case("a rank without tokens", **DPEP, **BF16, tokens=(0, 5)),
    Case("same tokens", **EP, **BF16, tokens=(19,)),
    Case("fixed", **DPEP, **BF16, tokens=(64, 64), fixed=True),
    Case("one expert takes all EP14", **DPEP, **BF16, tokens=(257, 100), all_to=15),
    Case("shared expert", **DPEP, **BF16, tokens=(40, 7), layer={"shared_intermediate_size": 128}),
    Case("gradients", **DPEP, **SIZES, tokens=(40, 7)),
    Case("gradients bf16", **DPEP, **BF16 | {"grads": True}, tokens=(40, 7)),
    Case(
        "bits", **DPEP, **BF16, tokens=(70, 33), deterministic=True, batch_invariant=True,
        placement=(tuple(range(15, 8, -1)), tuple(range(9))),
    ),
    Case("fp8 block", **DPEP, **BF16, tokens=(70, 33), scheme="fp8_block"),
    Case("nvfp4", **DPEP, **BF16, tokens=(70, 33), scheme="nvfp4"),
]  # fmt: skip
WIDTH = [
    Case("bf16", **TP, **BF16, tokens=(70,), layer={"bias": True}),
    Case("fp8 block", **TP, **BF16, tokens=(70,), scheme="fp8_block"),
    Case("mxfp4_a16", **TP, **BF16, tokens=(70,), scheme="mxfp4_a16"),
    Case("gradients", **TP, **SIZES, tokens=(40,), layer={"bias": True}),
]


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("case", EVERY, ids=lambda c: c.why)
def test_experts_of_two_gpus(two, case, exchange):
    for found in two.run(run, replace(case, exchange=exchange)):
        assert found["same_bits"] or not case.deterministic


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("tokens", [3, 3000])
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel", "fp8_tensor", "mxfp8", "nvfp4"])
def test_tokens_go_as_codes(two, scheme, tokens, exchange):
    """The bits of quantising them afterwards, and fewer bytes."""
    case = Case("", **DPEP, **BF16, tokens=(tokens,) * 2, scheme=scheme, exchange=exchange)
    for found in two.run(coded, case):
        assert found["codes"] and torch.equal(found["before"].cpu(), found["after"].cpu())
        assert 0 < found["before sent"] < found["after sent"]


@pytest.mark.parametrize("case", WIDTH, ids=lambda c: c.why)
def test_width_of_two_gpus(two, case):
    two.run(run, case)


@pytest.mark.parametrize("how", [DPEP, EP, TP], ids=["dp+ep", "ep", "tp"])
@pytest.mark.parametrize("scheme", ["mxfp4_a16", "nvfp4_a16"])
def test_gradients_through_quantised_experts(two, scheme, how):
    sizes = SIZES | {"tokens": (700, 40) if "dp" in how else (700,)}
    two.run(gradient_ranks.through_codes, Case("", **how, **sizes, scheme=scheme))


@pytest.mark.parametrize("case", [EVERY[7], WIDTH[3]], ids=lambda c: f"{c.why} {c.tp or c.ep}")
def test_adapters_on_two_gpus(two, case, tmp_path):
    two.run(lora_ranks.trained, case, str(tmp_path))
    of_each, of_one = (files(tmp_path / name) for name in ("divided", "whole"))
    assert of_each == of_one


@torch.no_grad()
def captured(rank: int, case: Case) -> int:
    """A captured call gives the bits of an eager one, for other tokens too."""
    layer = spread(case, make_whole(case))
    x = tokens_of(case)[layer.experts.parallel.layout.owners.rank]
    given = x.clone()
    with fixed_tokens(None if case.fixed is True else case.fixed):
        for _ in range(2):
            layer(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = layer(given)
        differ = 0
        for factor in (1.0, -2.0, 0.5):
            given.copy_(x.roll(int(4 * factor), 0) * factor)
            graph.replay()
            torch.cuda.synchronize()
            got = y.clone()
            differ += int(not torch.equal(got, layer(given)))
    torch.cuda.synchronize()
    layer.experts.parallel.raise_if_dropped()
    return differ


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize(
    "case",
    [
        Case("bf16", **DPEP, **BF16, tokens=(64, 64), fixed=True),
        Case("same tokens", **EP, **BF16, tokens=(64,), fixed=True),
        Case(
            "placed, shared expert", **DPEP, **BF16, tokens=(9, 9), fixed=True,
            placement=(tuple(range(8, 16)), tuple(range(8))),
            layer={"shared_intermediate_size": 128},
        ),
        Case("fp8 block", **DPEP, **BF16, tokens=(64, 64), scheme="fp8_block", fixed=True),
        Case(
            "copies", **DPEP, **BF16, tokens=(9, 9), fixed=True,
            placement=((*range(8), 15, 12), (*range(8, 16), 0)),
        ),
    ],
    ids=lambda c: c.why,
)  # fmt: skip
def test_cuda_graphs_capture_fixed_calls(two, case, exchange):
    assert two.run(captured, replace(case, exchange=exchange)) == [0, 0]


def uncaptured(rank: int, case: Case) -> str:
    layer, x = spread(case, make_whole(case)), tokens_of(case)[rank]
    with torch.no_grad(), fixed_tokens():
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                layer(x)
        except RuntimeError as error:
            return str(error)
    return "captured"


def test_a_first_call_is_not_captured(two):
    case = Case("first", **DPEP, **BF16, tokens=(8, 8))
    for said in two.run(uncaptured, case):
        assert "run the layer once before it is captured" in said
