"""tmoe's adapters on experts beside PEFT's on attention, and what PEFT says of dropout."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import tmoe
from tests.integrations.families import BY_NAME
from tests.integrations.family import outputs
from tests.integrations.test_trainer import train_model
from tests.integrations.test_training import gradients
from tests.lora.test_lora import shaken

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "o_proj"]


def adapted(scheme: str | None = None) -> nn.Module:
    """PEFT's adapters, with dropout, on attention; ours on the experts. PEFT comes first: it
    freezes what it finds."""
    model = BY_NAME["qwen3_moe"].build()
    tmoe.replace_moe(model, scheme)
    config = peft.LoraConfig(r=4, lora_dropout=0.2, target_modules=ATTENTION)
    wrapped = peft.get_peft_model(model, config)
    tmoe.lora.add(wrapped, rank=4)
    return wrapped


@pytest.mark.parametrize("scheme", [None, "nvfp4_a16"])
def test_both_are_trained_and_nothing_else(scheme):
    model = shaken(adapted(scheme))
    got = gradients(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert got.keys() == trained and all(g.any() for g in got.values())  # GR01
    assert {"experts.lora" in name for name in trained} == {True, False}
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_the_same_when_the_layer_is_computed_again(reentrant, tmp_path):
    """Checkpointing brings the random state of attention's dropout back; ours draws nothing."""
    torch.manual_seed(0)
    want = train_model(shaken(adapted()), tmp_path)
    again = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }
    torch.manual_seed(0)
    assert train_model(shaken(adapted()), tmp_path, **again) == want


def test_files_of_a_wrapped_model(tmp_path):
    """Saved from inside PEFT's wrapper, the experts' adapters fit the model with and without it."""
    model = shaken(adapted()).eval()
    with torch.no_grad():
        y = outputs(model)
        tmoe.lora.save(model, tmp_path / "experts")
        model.save_pretrained(tmp_path / "attention")
        plain = BY_NAME["qwen3_moe"].build()
        tmoe.replace_moe(plain)
        tmoe.lora.load(plain, tmp_path / "experts")
        loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "attention")
        assert torch.equal(outputs(loaded), y)
        tmoe.lora.remove(loaded)
        tmoe.lora.load(loaded, tmp_path / "experts")
        assert torch.equal(outputs(loaded), y)
    named = json.loads((tmp_path / "experts" / "adapter_config.json").read_text())
    assert named["target_parameters"][0].startswith("model.layers.0.")


def test_there_is_no_dropout_on_experts(tmp_path):
    """PEFT refuses it on parameters of experts, replaced or not, and we a file that asks for it."""
    model = BY_NAME["qwen3_moe"].build()
    tmoe.replace_moe(model)
    config = peft.LoraConfig(lora_dropout=0.05, target_parameters=["experts.down_proj"])
    with pytest.raises(ValueError, match="does not work with lora_dropout != 0"):
        peft.get_peft_model(model, config)
    tmoe.lora.add(model, rank=4)
    tmoe.lora.save(model, tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_dropout": 0.05}))
    tmoe.lora.remove(model)
    with pytest.raises(ValueError, match="folder must be adapters with lora_dropout 0.0, got 0.05"):
        tmoe.lora.load(model, tmp_path)


def test_peft_cannot_adapt_codes():
    """Neither by name nor by its "all-linear", which takes stacked experts too: both say what can.
    What makes a model of bitsandbytes ready for training has nothing to do here."""
    for how in ({"target_parameters": ["experts.down_proj"]}, {"target_modules": "all-linear"}):
        model = BY_NAME["qwen3_moe"].build()
        tmoe.replace_moe(model, "nvfp4_a16")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, **how))
        with pytest.raises(NotImplementedError, match="beside codes are made by tmoe.lora.add"):
            outputs(wrapped)
    model = BY_NAME["qwen3_moe"].build().bfloat16()
    tmoe.replace_moe(model, "nvfp4_a16")
    with pytest.raises(AttributeError, match="to train adapters nothing has to be prepared"):
        peft.prepare_model_for_kbit_training(model)
