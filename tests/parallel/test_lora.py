"""Adapters on experts that several ranks share are those that one rank would have."""

import pytest

from tests.parallel import lora_ranks
from tests.parallel.cases import Case
from tests.parallel.ranks import ranks

DPEP = {"mesh": (2,), "dims": ("x",), "ep": "x", "dp": "x"}
TP = {"mesh": (2,), "dims": ("x",), "tp": "x"}
CASES = [
    Case("ep", **DPEP, tokens=(5, 3)),
    Case("all_to_all, copies", **DPEP, tokens=(5, 6), exchange="all_to_all", top_k=3,
         placement=((5, 0, 3, 1), (1, 2, 4, 5))),
    Case("tp", **TP, tokens=(5,), layer={"bias": True}, intermediate=33),
    Case("tp, interleaved", **TP, tokens=(5,),
         layer={"interleaved": True, "activation": "swiglu_oai"}),
    Case("tp, no gate", **TP, tokens=(5,), layer={"activation": "relu2"}),
    Case("quantised", **DPEP, tokens=(5, 3), scheme="fp8_channel", hidden=64, intermediate=48),
]  # fmt: skip


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.why)
def test_two_ranks_train_and_save_what_one_does(two, case, tmp_path):
    two.run(lora_ranks.trained, case, str(tmp_path))
    assert files(tmp_path / "divided") == files(tmp_path / "whole")


def test_four_ranks_too(tmp_path):
    case = Case("", (2, 2), ("a", "b"), (5, 2), tp="b", ep="a", dp="a", layer={"bias": True})
    with ranks(4) as four:
        four.run(lora_ranks.trained, case, str(tmp_path))
    assert files(tmp_path / "divided") == files(tmp_path / "whole")


def test_adapters_move_with_their_experts_and_merge(two):
    two.run(lora_ranks.moved)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.why)
def test_adapters_of_experts_that_are_divided_already(two, case, tmp_path):
    """Copies of an expert, and ranks that divide its width, begin alike."""
    two.run(lora_ranks.afterwards, case, str(tmp_path))
    assert files(tmp_path / "divided") == files(tmp_path / "whole")


def test_no_adapters_are_not_saved(two):
    for said in two.run(lora_ranks.refused):
        assert "lora.save: model must be one with adapters" in said


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_a_model_of_transformers(two, name):
    two.run(lora_ranks.of_a_model, name)


def test_a_quantised_model_of_transformers_sends_codes(two):
    for coded, plain in two.run(lora_ranks.coded_model):
        assert plain - coded == 2 * 12 * 128  # of each token's row in each of two layers
