"""That no family is forgotten, that the others are refused by name, and how a config is read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.routing import document
from tests.routing.case import PINNED
from tests.routing.cases import CASES, HASH
from tmoe.routing import Routing, RoutingMethod
from tmoe.routing.families import FAMILIES, REFUSED
from tmoe.routing.routers import NUM_EXPERTS

MODELS = Path(transformers.__file__).parent / "models"
ROUTER = re.compile(r"^class (\w+(?:Router|TopKGating|MoEV1Gate))\(", re.MULTILINE)
USES_EXPERTS = re.compile(r"^@use_experts_implementation|^class \w+Experts\(", re.MULTILINE)

# Classes by that name that select no experts, and one that no model uses.
NOT_OURS = {
    "GraniteDoclingDensityRouter",  # how densely to sample an image
    "Qwen3OmniMoeTextTopKRouter",  # left over: the thinker's layers have a router of their own
    "SwitchTransformersTop1Router",
    "NllbMoeTop2Router",
    "DbrxRouter",  # only the logits; DbrxFFN, which is tested, selects
}
WHAT_TO_DO = (
    "{} is new in transformers {}. Give its model type a router in tmoe/routing/routers.py and a "
    "place in tmoe/routing/families.py, add a case to tests/routing/cases.py, and run "
    "`python -m tests.routing.document`"
)


def complain(news):
    """Fail for the pinned transformers; a newer one only gets a note."""
    if news:
        message = WHAT_TO_DO.format(", ".join(sorted(news)), transformers.__version__)
        pytest.fail(message) if PINNED else pytest.skip(message)


def test_every_model_type_has_a_case():
    names = {name for names in FAMILIES.values() for name in names}
    assert names == {case.model_type for case in CASES}
    assert sum(map(len, FAMILIES.values())) == len(names), "a model type with two routers"


def test_every_router_of_transformers_is_compared():
    found = {
        name for path in MODELS.glob("*/modeling_*.py") for name in ROUTER.findall(path.read_text())
    }
    complain(found - NOT_OURS - {case.router for case in [*CASES, HASH]})


def test_every_folder_with_experts_is_known():
    """Families whose router is no class of its own would escape the test above."""
    found = {
        path.parent.name
        for path in MODELS.glob("*/modeling_*.py")
        if USES_EXPERTS.search(path.read_text())
    }
    known = {Path(case.source).parent.name for case in CASES}
    complain(found - known - {name.replace("-", "_") for name in REFUSED})


def test_every_config_builds_or_says_why_not(monkeypatch):
    """All of transformers' default configs: whoever has experts is known, and wrappers find it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    built, overlooked = set(), set()
    for model_type in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[model_type]()
        except (ValueError, OSError, ImportError, StrictDataclassError):
            # a default that its own checks refuse, that is on the Hub, or that needs a package
            continue
        try:
            Routing.from_transformers(config)
            built.add(model_type)
        except ValueError as error:
            assert str(error).startswith(f"Routing.from_transformers: {config.model_type}: ")
            if "is no Mixture-of-Experts" in str(error) and vars(config).keys() & set(NUM_EXPERTS):
                overlooked.add(model_type)
    complain(overlooked)
    assert {"mixtral", "llama4", "qwen3_vl_moe", "kimi_k25", "qwen3_omni_moe"} <= built
    assert not {"llama", "bert", "t5", "gemma4", "clip", "musicgen", *REFUSED} & built


@pytest.mark.skipif(not PINNED, reason="the page is about the pinned transformers")
def test_the_page_is_in_step():
    message = "run `python -m tests.routing.document`"
    assert document.PAGE.read_text() == document.page(), message


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_named_method_where_the_maths_is_the_same(case):
    """So that a backend which knows methods by name can take the family."""
    named = {
        "Default": "jamba deepseek_v2 deepseek_ocr2_text unlimited_ocr_text",
        "RenormalizeNaive": "mixtral minimax qwen3_5_moe_text qwen3_vl_moe_text hunyuan_v1_moe "
        "qwen2_moe qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_omni_moe_talker_text "
        "qwen4_exp_text mellum olmoe flex_olmo lara_mini dbrx",
        "Renormalize": "gpt_oss granitemoe granitemoehybrid granitemoeshared granitemoe_swa jetmoe "
        "aria_text cohere2_moe",
        "Llama4": "llama4_text",
        "MiniMax2": "afmoe hy_v3 dots3_note_vision_encoder inkling2_text inkling2_loop_text",
        "DeepSeekV3": " ".join(
            name
            for router, names in FAMILIES.items()
            for name in names
            if router.__name__.startswith("sigmoid_groups")
        ),
    }
    method = Routing.from_transformers(case.config(case.configs[0])).method
    wanted = [name for name, types in named.items() if case.model_type in types.split()]
    assert (method.name if isinstance(method, RoutingMethod) else None) == (wanted or [None])[0]


def config(model_type="mixtral", **fields):
    fields = dict(num_local_experts=8, num_experts_per_tok=2) | fields
    return SimpleNamespace(model_type=model_type, **fields)


def test_any_object_with_the_fields():
    assert Routing.from_transformers(config()) == Routing(8, 2, "RenormalizeNaive")
    wrapper = SimpleNamespace(model_type="some_vl", text_config=config())
    assert Routing.from_transformers(wrapper) == Routing(8, 2, "RenormalizeNaive")
    lists = config("hunyuan_v1_moe", num_local_experts=8, moe_topk=[2, 2], num_experts_per_tok=None)
    assert Routing.from_transformers(lists) == Routing(8, 2, "RenormalizeNaive")


DEEPSEEK = dict(routed_scaling_factor=2.5, norm_topk_prob=True)
REFUSED_CONFIGS = {
    "dense": (config("llama"), "llama is no Mixture-of-Experts family that tmoe knows"),
    "a wrapper of one": (
        SimpleNamespace(model_type="llava", text_config=config("llama")),
        "llava: llama is no Mixture-of-Experts family",
    ),
    "no model type": (SimpleNamespace(), "SimpleNamespace: None is no Mixture-of-Experts family"),
    "no experts": (config("granitemoehybrid", num_local_experts=0), "granitemoehybrid: a dense"),
    "no moe block": (config("gemma4_text", enable_moe_block=False), "gemma4_text: a dense model"),
    "no moe layer": (
        config("nemotron_h", layers_block_type=["attention"], **DEEPSEEK),
        "nemotron_h: a dense model",
    ),
    "a missing field": (config("qwen3_moe"), "qwen3_moe: the config has no norm_topk_prob"),
    "a missing number": (config(num_local_experts=None), "mixtral: the config has no n_routed_e"),
    "k > E": (config(num_experts_per_tok=9), "mixtral: Routing: top_k must be at most num_exp"),
    "groups": (config("deepseek_v3", n_group=3, **DEEPSEEK), "n_group must be a divisor of"),
    "layers that differ": (config(num_experts_per_tok=[2, 4]), "differs between layers: .2, 4."),
    "a p-norm": (
        config("dbrx", ffn_config=config(moe_normalize_expert_weights=2.0)),
        "dbrx: moe_normalize_expert_weights must be None or 1, got 2.0",
    ),
    "DeepSeek's topk_method": (
        config("deepseek_v2", routed_scaling_factor=1.0, topk_method="noaux_tc"),
        "deepseek_v2: topk_method must be greedy or group_limited_greedy, got 'noaux_tc'",
    ),
    "Cohere's function": (config("cohere2_moe", expert_selection_fn="relu"), "got 'relu'"),
    "a score": (config("deepseek_v4", scoring_func="softmax"), "sqrtsoftplus or sigmoid, got 'so"),
    "SparseMixer": (
        config("phimoe", num_experts_per_tok=4, router_jitter_noise=0.01),
        "phimoe: its router always selects 2 experts, num_experts_per_tok is 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_refused(case):
    config, message = REFUSED_CONFIGS[case]
    with pytest.raises(ValueError, match=f"^Routing.from_transformers: .*{message}"):
        Routing.from_transformers(config)


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_families(model_type):
    with pytest.raises(ValueError, match=f"^Routing.from_transformers: {model_type}: "):
        Routing.from_transformers(config(model_type))


@pytest.mark.skipif(not PINNED, reason="a family of the pinned transformers")
def test_layers_that_differ_each_have_a_config():
    """dots3_note's vision layers have from 4 to 64 experts."""
    vision = CONFIG_MAPPING["dots3_note"]().vision_config
    with pytest.raises(ValueError, match="dots3_note_vision_encoder: .* differs between layers"):
        Routing.from_transformers(vision)
    first = vision.mlp_layer_types.index("sparse")
    for layer, E in ((first, 4), (first + 1, 8), (len(vision.mlp_layer_types) - 1, 64)):
        config = vision.per_layer_config[layer]
        assert Routing.from_transformers(config) == Routing(E, 2, "MiniMax2")


def test_transformers_is_not_imported():
    code = (
        "import sys; from types import SimpleNamespace as S; from tmoe import Routing;"
        "Routing.from_transformers("
        "S(model_type='mixtral', num_local_experts=8, num_experts_per_tok=2));"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
