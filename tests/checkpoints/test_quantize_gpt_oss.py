"""gpt-oss quantised on disk into its own MXFP4 layout."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Mxfp4Config

import tmoe
from tests.checkpoints.tiny_models import gpt_oss, qwen3_moe, save
from tmoe.checkpoints import quantize_checkpoint

LAYER = "model.layers.1.mlp.experts"


@pytest.fixture
def source(tmp_path):
    return save(gpt_oss(), tmp_path / "source", shards=False)


def test_transformers_reads_it(source, tmp_path):
    """And gets the values that replace_moe makes in place; biases and all others stay."""
    report = quantize_checkpoint(source, tmp_path / "out", "mxfp4_a16", format="gpt-oss")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written[f"{LAYER}.gate_up_proj_blocks"].shape == (4, 192, 4, 16)
    assert written[f"{LAYER}.gate_up_proj_scales"].shape == (4, 192, 4)
    assert written[f"{LAYER}.down_proj_blocks"].shape == (4, 128, 3, 16)
    model, before = gpt_oss(), dict(gpt_oss().named_parameters())
    in_place = tmoe.replace_moe(model, "mxfp4_a16")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    for name, parameter in loaded.named_parameters():
        want = before[name]
        if name.endswith(("gate_up_proj", "down_proj")):
            want = model.get_parameter(name).dequantize(torch.bfloat16).transpose(1, 2)
        assert torch.equal(parameter, want), name
    for name, errors in in_place.errors.items():
        for part, error in errors.items():
            assert report.errors[name][part].snr_db == pytest.approx(error.snr_db, abs=1e-3)


def test_tmoe_reads_it(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "out", "mxfp4_a16", format="gpt-oss")
    model, ids = gpt_oss(), torch.arange(24).view(2, 12)
    tmoe.replace_moe(model, "mxfp4_a16")
    loaded = tmoe.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4"
    assert "model.layers.0.mlp.router" in config["modules_to_not_convert"]


def test_other_pairs_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match="gpt-oss use mxfp4_a16 in gpt-oss' own format"):
        quantize_checkpoint(source, tmp_path / "a", "mxfp4_a16")
    with pytest.raises(ValueError, match="compressed-tensors or modelopt for nvfp4"):
        quantize_checkpoint(source, tmp_path / "b", "nvfp4", format="gpt-oss")
    other = save(qwen3_moe(), tmp_path / "other")
    with pytest.raises(ValueError, match="another one for qwen3_moe"):
        quantize_checkpoint(other, tmp_path / "c", "mxfp4_a16", format="gpt-oss")
