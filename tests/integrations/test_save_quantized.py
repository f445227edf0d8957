"""`save_pretrained` after quantising in place: what tmoe quantize writes, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tmoe
from tests.checkpoints.tiny_models import gpt_oss, qwen3_moe, save
from tests.integrations.families import BY_NAME
from tmoe.checkpoints import quantize_checkpoint
from tmoe.checkpoints.write_formats import WRITTEN
from tmoe.integrations.transformers.quantized import scheme_of
from tmoe.integrations.transformers.switch import expert_modules


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same_files(got: Path, want: Path) -> None:
    """Tensors by name and bytes, and the configuration."""
    saved, written = tensors(got), tensors(want)
    assert saved.keys() == written.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == written[name].dtype and tensor.shape == written[name].shape, name
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (tensor, written[name])))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (got, want)]
    stated = [config["quantization_config"] for config in configs]
    for one in stated:
        for key in ("ignore", "modules_to_not_convert"):
            one.get(key, []).sort()
    assert stated[0] == stated[1]


@pytest.mark.column("saved")
@pytest.mark.parametrize("scheme", sorted({scheme for _, scheme in WRITTEN}))
def test_the_same_files_as_on_disk(scheme, tmp_path):
    source = save(qwen3_moe(), tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "want", scheme)
    model = qwen3_moe()
    tmoe.replace_moe(model, scheme)
    model.save_pretrained(tmp_path / "got", max_shard_size="100KB")
    assert_same_files(tmp_path / "got", tmp_path / "want")
    model.save_pretrained(tmp_path / "again")  # nothing was used up
    assert tensors(tmp_path / "again").keys() == tensors(tmp_path / "got").keys()


def static_scales(model):
    scheme_of(next(m for _, m in expert_modules(model))).input_scale = torch.ones(())


@pytest.mark.parametrize(
    ("name", "scheme", "change", "reason"),
    [
        ("gpt_oss", "mxfp4_a16", None, "the layout of GptOssExperts"),
        ("openai_privacy_filter", "fp8_channel", None, "biases"),
        ("granitemoe", "fp8_channel", None, "its names in a file"),
        ("jetmoe", "fp8_channel", None, "the layout of"),
        ("mixtral", "fp8_block", None, "gate and up have 48 rows, no multiple of 128"),
        ("mixtral", "nvfp4", static_scales, "static scales"),
    ],
)
def test_what_cannot_be_written_is_refused(name, scheme, change, reason, tmp_path):
    """Before any file of weights, with the command that can do it."""
    model = BY_NAME[name].build()
    tmoe.replace_moe(model, scheme)
    if change is not None:
        change(model)
    with pytest.raises(NotImplementedError, match=f"{reason}.*tmoe quantize MODEL_DIR OUT_DIR"):
        model.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.glob("out/*"))


def test_a_part_of_the_model_too(tmp_path):
    model = qwen3_moe()
    tmoe.replace_moe(model, "fp8_channel")
    model.model.save_pretrained(tmp_path / "part")
    names = tensors(tmp_path / "part")
    assert "layers.1.mlp.experts.3.up_proj.weight_scale" in names


# compressed-tensors has the reciprocal of the global scale, which rounds.
ROUNDED = [("compressed-tensors", s) for s in ("nvfp4", "nvfp4_a16")]
FORMATS = [pytest.param(*pair, marks=pytest.mark.column(pair[0])) for pair in WRITTEN]


@pytest.mark.parametrize(("method", "scheme"), FORMATS)
def test_quantised_on_disk_tmoe_loads_it(method, scheme, tmp_path):
    """With the same logits as the model that was quantised in place, bit by bit."""
    model, ids = (gpt_oss if method == "gpt-oss" else qwen3_moe)(), torch.arange(24).view(2, 12)
    source = save(model, tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "out", scheme, format=method)
    tmoe.replace_moe(model, scheme)
    loaded = tmoe.from_pretrained(tmp_path / "out", scheme=scheme)
    with torch.no_grad():
        got, want = loaded(ids).logits, model(ids).logits
    if (method, scheme) in ROUNDED:
        torch.testing.assert_close(got, want)
    else:
        assert torch.equal(got, want)


@pytest.mark.column("saved")
@pytest.mark.parametrize("scheme", sorted({scheme for _, scheme in WRITTEN}))
def test_saved_tmoe_loads_it(scheme, tmp_path):
    """The same, of what `save_pretrained` wrote."""
    model, ids = qwen3_moe(), torch.arange(24).view(2, 12)
    tmoe.replace_moe(model, scheme)
    model.save_pretrained(tmp_path / "out")
    loaded = tmoe.from_pretrained(tmp_path / "out", scheme=scheme)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
