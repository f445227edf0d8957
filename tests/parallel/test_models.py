"""Whole models of transformers on two ranks say what they say on one."""

import pytest

from tests.integrations.families import FAMILIES
from tests.parallel import model_ranks
from tmoe.integrations.transformers.version import before

NAMES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "llama4_text")
WAYS = {
    "ep": ({"ep": "x"}, None, 1 / 2),
    "placed": ({"ep": "x", "placement": model_ranks.PLACED, "exchange": "all_to_all"}, None, 5 / 8),
    "tp": ({"tp": "x"}, None, 2 / 3),  # 48 numbers: 32 and 16
    "quantised": ({"ep": "x"}, "fp8_channel", 1 / 2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_on_two_ranks_says_the_same(two, name, way):
    """Each rank has its part of the experts; router, attention and all else are untouched."""
    spread, scheme, held = WAYS[way]
    found = two.run(model_ranks.compare, name, scheme, spread)
    assert max(one["held"] for one in found) <= held + 0.2 * (way == "tp")


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
def test_each_rank_has_prompts_of_its_own(two, exchange):
    spread = {"ep": "x", "dp": "x", "exchange": exchange}
    two.run(model_ranks.compare, "qwen3_moe", None, spread, own_tokens=True)


def test_ranks_generate_as_many_tokens_as_they_like(two):
    two.run(model_ranks.different_lengths)


def test_gradients_of_a_model_with_copies_of_experts(two):
    two.run(model_ranks.gradients)


@pytest.mark.parametrize("name, scheme", [("gpt_oss", None), ("qwen3_moe", "fp8_channel")])
def test_experts_of_a_model_are_rebalanced(two, name, scheme):
    assert two.run(model_ranks.rebalanced, name, scheme) == [4, 4]


def test_a_norm_after_each_expert_wants_its_whole_width(two):
    family = next(family for family in FAMILIES if family.name == "muse_spark_text")
    family.need()
    two.run(model_ranks.compare, "muse_spark_text", None, {"ep": "x"})
    for told in two.run(model_ranks.refused, "muse_spark_text", True, {"tp": "x"}):
        assert "tp must be 1" in told and "a norm follows each expert" in told


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4_text"])
def test_a_divided_model_refuses_what_would_see_a_part(two, name):
    for told in two.run(model_ranks.afterwards, name):
        assert "RuntimeError: restore: the experts are divided among ranks" in told["restore"]
        assert "RuntimeError: save_pretrained: the experts are divided" in told["save"]
        assert "it is divided already" in told["again"]
        assert "record before they are divided" in told["record"]
        assert "quantise first, then divide" in told["quantise"]
        if name == "qwen3_moe":  # Llama 4 has no other
            assert 'only experts_implementation="tmoe" can run' in told["another implementation"]


@pytest.mark.parametrize(
    "name, replaced, words",
    [
        ("dbrx", True, "TmoeDbrxExperts 'transformer.blocks.0.ffn.experts': its gate and up"),
        ("jetmoe", True, "its projections are modules of their own"),
        ("longcat_flash", True, "some of its experts return their input"),
        ("fp8", False, "FP8Experts 'experts': transformers' FP8 experts have tensors of their own"),
        ("lora", True, "model.layers.1.mlp.experts.down_proj must be without a parametrisation"),
        pytest.param(
            "aria_text", True, "its projections are modules of their own",
            marks=pytest.mark.skipif(not before("5.18"), reason="on the interface since 5.18"),
        ),
        ("mixtral", False, "MixtralExperts 'model.layers.0.mlp.experts': it isn't on tmoe yet"),
        ("llama4_text", False, "it isn't on tmoe yet: call tmoe.replace_moe(model) first"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused_by_name(two, name, replaced, words):
    for told in two.run(model_ranks.refused, name, replaced, {"ep": "x"}):
        assert words in told, told


def test_in_a_plan_of_torch_beside_its_styles_for_attention(two):
    two.run(model_ranks.styled)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder, done = tmp_path_factory.mktemp("models"), {}

    def save(name):
        if name not in done:
            model_ranks.build(name).save_pretrained(folder / name)
            done[name] = str(folder / name)
        return done[name]

    return save


@pytest.mark.parametrize("own", [True, False], ids=["experts_implementation", "replace_moe"])
@pytest.mark.parametrize("how", ["tp", "ep"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_model_that_transformers_divided_runs_on_tmoe(two, saved, name, how, own):
    """By its tp_plan, or by its expert parallelism: ids past the local experts, weights of 0, the
    sum over ranks are transformers' own (EP06, EP07, EP10)."""
    divided = {"tp": (8, 64, 24), "ep": (4, 64, 48)}[how]
    if name == "gpt_oss":  # stored transposed; its plan leaves the experts whole
        divided = {"tp": (8, 48, 64), "ep": (4, 48, 64)}[how]
    for found in two.run(model_ranks.by_transformers, saved(name), how, own):
        assert found["calls"] == 2 * (model_ranks.NEW_TOKENS + 1)
        assert found["shape"] == divided
        whole = name == "gpt_oss" and how == "tp"
        assert found["told"] == "right" if whole else "tp_plan does" in found["told"]
