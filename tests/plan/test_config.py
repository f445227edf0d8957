"""A plan's model from a config.json: what it gives, and what is said where it can't be read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from typer.testing import CliRunner

from tmoe.cli import app
from tmoe.plan import known_model, model_from_config

MIXTRAL = MixtralConfig(num_hidden_layers=1).to_dict()


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.mark.parametrize(
    "name, config",
    [
        ("mixtral-8x7b", MixtralConfig()),
        ("gpt-oss-120b", GptOssConfig()),
        ("llama4-scout", Llama4TextConfig()),  # not on transformers' interface
        ("qwen3-30b-a3b", Qwen3MoeConfig(
            num_hidden_layers=48, hidden_size=2048, moe_intermediate_size=768, num_experts=128,
            num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        )),
    ],
)  # fmt: skip
def test_a_config_gives_what_is_known(name, config, tmp_path):
    config.save_pretrained(tmp_path)
    known, found = known_model(name), model_from_config(tmp_path / "config.json")
    assert replace(found.shape, name=name) == known.shape and found.layers == known.layers
    assert found.other == pytest.approx(known.other, rel=0.01)


def test_a_config_has_its_groups(tmp_path):
    DeepseekV3Config(num_hidden_layers=5).save_pretrained(tmp_path)
    found = model_from_config(tmp_path)
    assert (found.n_group, found.topk_group, found.layers) == (8, 4, 2)


def test_a_config_without_experts_is_refused(tmp_path):
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of a model with MoE layers that tmoe knows, got Llama"):
        model_from_config(tmp_path)


def test_the_command_takes_a_config(tmp_path):
    MixtralConfig().save_pretrained(tmp_path)
    done = run("--model", str(tmp_path / "config.json"), "--gpus", "4", "--tokens", "16")
    assert done.exit_code == 0 and "mixtral, bf16" in done.output


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "config.json must be in JSON, got Expecting value: line 1"),
        ("{", "config.json must be in JSON, got Expecting property name"),
        ([1], "config.json must be an object in JSON, got list"),
        ({}, "model_type of config.json must be one that transformers"),
        ({"model_type": "a_model_of_tomorrow"}, "knows, got 'a_model_of_tomorrow'"),
        ({"model_type": 3}, "knows, got 3"),
        ({**MIXTRAL, "hidden_size": "abc"}, "expected int, got str (value: 'abc')"),
        ({**MIXTRAL, "hidden_size": -4}, "config.json can't be made into a model: RuntimeError:"),
        ({**MIXTRAL, "num_attention_heads": 0}, "can't be made into a model: ZeroDivisionError:"),
        ({**MIXTRAL, "architectures": 3}, "can't be made into a model: TypeError"),
        ({**MIXTRAL, "num_local_experts": 0}, "router that tmoe knows, got mixtral: a dense model"),
        ({**MIXTRAL, "num_experts_per_tok": 80}, "top_k must be at most num_experts=8, got 80"),
        ({**MIXTRAL, "num_hidden_layers": 0}, "config.json must be of a model with MoE layers"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_read_is_explained(content, said, tmp_path):
    """In a sentence with the file's name, whoever found the fault."""
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "config.json").write_text(text)
    done = run("--model", str(tmp_path), "--gpus", "4")
    words = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and said in words and "plan: " in words, (done.exception, words)
    assert "config.json" in words and "pip install" not in words
