"""``experts_implementation="tmoe"``, and the life of a model afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import tmoe
from tests.integrations.counting import CountOps
from tests.integrations.families import BY_NAME
from tests.integrations.family import DEVICE, IDS, outputs
from tmoe.integrations.transformers import register


def test_register_is_idempotent():
    register()
    first = ALL_EXPERTS_FUNCTIONS["tmoe"]
    register()
    assert ALL_EXPERTS_FUNCTIONS["tmoe"] is first


def test_from_config_and_set():
    register()
    config = BY_NAME["qwen3_moe"].build().config
    model = AutoModelForCausalLM.from_config(config, experts_implementation="tmoe").to(DEVICE)
    with torch.no_grad(), CountOps() as ops:
        outputs(model)
    assert dict(ops.calls) == {"fused_experts": 2}
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad(), CountOps() as ops:
        outputs(model)
    assert not ops.calls
    model.set_experts_implementation("tmoe")
    assert model.get_experts_implementation()[""] == "tmoe"


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4_text", "dbrx"])
def test_save_and_load(name, tmp_path):
    """What is saved is the model, with no trace of tmoe in files or config."""
    model = BY_NAME[name].build()
    with torch.no_grad():
        want = outputs(model)
    tmoe.replace_moe(model)
    model.save_pretrained(tmp_path)
    assert "tmoe" not in (tmp_path / "config.json").read_text().lower()
    plain = type(model).from_pretrained(tmp_path).to(DEVICE)
    assert {type(m).__name__ for m in plain.modules()}.isdisjoint(
        {"TmoeLlama4TextMoe", "TmoeDbrxExperts"}
    )
    with torch.no_grad():
        assert torch.equal(outputs(plain), want)
        if BY_NAME[name].on_interface:
            ours = type(model).from_pretrained(tmp_path, experts_implementation="tmoe")
            assert torch.equal(outputs(ours.to(DEVICE)), outputs(model))


@pytest.mark.parametrize(
    "name",
    ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoehybrid", "llama4_text", "dbrx"],
)
def test_same_greedy_tokens(name):
    model = BY_NAME[name].build()
    model.generation_config.eos_token_id = None
    settings = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    want = model.generate(IDS, **settings)
    tmoe.replace_moe(model)
    with CountOps() as ops:
        got = model.generate(IDS, **settings)
    assert torch.equal(got, want)
    assert ops.calls.total() == 12 * BY_NAME[name].expected_ops


@pytest.mark.parametrize(
    "name", ["mixtral", "gpt_oss", "llama4_text", "longcat_flash", "muse_spark_text"]
)
def test_compiles_without_graph_breaks(name):
    model = BY_NAME[name].build()
    tmoe.replace_moe(model)
    torch._dynamo.reset()
    with torch.no_grad():
        want = outputs(model)
        got = outputs(torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(got, want)


def test_import_is_lazy_and_missing_transformers_says_what_to_install():
    """In a process of its own, with transformers blocked."""
    code = """
import sys
import tmoe, tmoe.integrations.transformers as integration
assert "transformers" not in sys.modules
sys.modules["transformers"] = None  # importing it now raises ModuleNotFoundError
import torch
for call in (integration.register, lambda: tmoe.replace_moe(torch.nn.Linear(2, 2))):
    try:
        call()
    except ImportError as error:
        assert "tmoe[transformers]" in str(error), error
    else:
        raise AssertionError("no ImportError")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
