"""Each rank reads its own experts from a checkpoint, and nothing else of them."""

import pytest

from tests.parallel import load_ranks
from tmoe.parallel import Placement

PLACED = Placement(8, ((7, 0, 3), (1, 2, 4, 5, 6)))
EP = {"ep": "x"}
OUT_OF_ORDER = {"ep": "x", "dp": "x", "placement": PLACED}
TP = {"tp": "x"}
CASES = [  # experts as transformers writes them: one by one, or fused; and as tmoe quantises them
    ("qwen3_moe", None, (EP, OUT_OF_ORDER, TP)),
    ("mixtral", None, (OUT_OF_ORDER, TP)),
    ("gpt_oss", None, (EP, OUT_OF_ORDER, TP)),
    ("llama4_text", None, (OUT_OF_ORDER, TP)),
    ("qwen3_moe", "fp8_block", (EP, OUT_OF_ORDER, TP)),
    ("qwen3_moe", "nvfp4_a16", (OUT_OF_ORDER, TP)),
    ("gpt_oss", "mxfp4_a16", (OUT_OF_ORDER, TP)),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder, done = tmp_path_factory.mktemp("checkpoints"), {}

    def save(name, scheme):
        path = folder / f"{name}-{scheme}"
        if path not in done:
            load_ranks.save(name, scheme, path)
            done[path] = str(path)
        return done[path]

    return save


@pytest.mark.parametrize(
    "name, scheme, spread",
    [(name, scheme, spread) for name, scheme, ways in CASES for spread in ways],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
def test_a_rank_reads_its_experts_alone(two, saved, name, scheme, spread):
    """The rest of the model is read by all; of quantised experts, the whole width, and their scales
    twice, to be checked."""
    found = two.run(load_ranks.load, saved(name, scheme), spread)
    for rank, one in enumerate(found):
        held = {1: 1 / 2, 3: (3 / 8, 5 / 8)[rank]}[len(spread)]
        if "tp" in spread and scheme is not None:
            held = 1
        share = one["files"] - (1 - held) * one["experts"]
        more = 0.0 if scheme is None else 0.1 * held * one["experts"]
        assert 0.98 * share <= one["read"] <= 1.02 * share + more, (one, share)


def test_what_does_not_fit_is_refused_before_a_tensor_is_read(two, saved, tmp_path):
    path = saved("qwen3_moe", "fp8_block")
    three = {"placement": Placement.contiguous(8, 3)}
    for spread, words in (
        ({"ep": "experts"}, "ep must be of the mesh's dimensions x"),
        ({"ep": "x"} | three, "placement must be of 2 ranks, got 3"),
    ):
        for told in two.run(load_ranks.refused, path, spread):
            assert words in told, told
    name = "model.layers.0.mlp.experts.6.up_proj.weight"  # rank 1 was to hold it
    path = load_ranks.without(saved("qwen3_moe", None), tmp_path / "less", name)
    for told in two.run(load_ranks.refused, path, {"ep": "x"}):
        assert "experts.*.up_proj.weight must be of experts 0 to 7, got none of [6]" in told, told
