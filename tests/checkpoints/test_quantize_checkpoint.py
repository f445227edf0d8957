"""Models quantised on disk: the values, and the files around them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import tmoe
from tests.checkpoints.tiny_models import llama4, qwen3_moe, save
from tests.live_bytes import LiveBytes
from tmoe.checkpoints import Checkpoint, quantize_checkpoint, read_experts
from tmoe.checkpoints.write_formats import METHODS, WRITTEN
from tmoe.cli import app
from tmoe.formats import QuantizedTensor

INDEX = "model.safetensors.index.json"
PER_LINEAR = [method for method in METHODS if method != "gpt-oss"]  # that one has its own tests
LAYER = "model.layers.1.mlp.experts"


def quantize(source: Path, out: Path, scheme: str, format: str | None = None):
    return quantize_checkpoint(source, out, scheme, format=format)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(("method", "scheme"), [key for key in WRITTEN if key[0] in PER_LINEAR])
def test_the_files_hold_what_the_model_would(method, scheme, source, tmp_path):
    """Read back, they are the weights that replace_moe makes in place, bit by bit.

    But compressed-tensors stores the reciprocal of NVFP4's global scale, which rounds.
    """
    report = quantize(source, tmp_path / "out", scheme, method)
    model = qwen3_moe()
    in_place = tmoe.replace_moe(model, scheme)
    checkpoint = Checkpoint(tmp_path / "out")
    for name in in_place.errors:
        read = read_experts(checkpoint, name, scheme=scheme)
        for part in ("gate_up_proj", "down_proj"):
            got, want = getattr(read, part), model.get_parameter(f"{name}.{part}")
            assert isinstance(got, QuantizedTensor)
            if method == "compressed-tensors" and got.global_scale is not None:
                scale = want.global_scale
                scale = scale.unsqueeze(-1) if got.global_scale.ndim == 2 else scale
                torch.testing.assert_close(
                    got.global_scale, scale.expand_as(got.global_scale), rtol=2e-7, atol=0
                )
                torch.testing.assert_close(got.dequantize(), want.dequantize(), rtol=2e-7, atol=0)
            else:
                assert torch.equal(got.dequantize(), want.dequantize())
            error = report.errors[name][part]
            assert error.snr_db == pytest.approx(in_place.errors[name][part].snr_db, abs=1e-3)
            assert f"{error.snr_db:.1f} dB" in str(report)
    assert not report.left_alone and report.bytes_after < 0.7 * report.bytes_before
    assert bool(report.note) == (scheme == "nvfp4")


@pytest.mark.parametrize("format", PER_LINEAR)
def test_everything_else_is_copied(format, source, tmp_path):
    scheme = "fp8_block" if format == "deepseek" else "fp8_channel"
    out = tmp_path / "out"
    report = quantize(source, out, scheme, format)
    before, after = tensors(source), tensors(out)
    for name, tensor in before.items():
        if ".experts." not in name:
            assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor)
    index = json.loads((out / INDEX).read_text())
    assert index["weight_map"].keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())
    assert index["metadata"]["total_size"] == report.bytes_after
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "pt") as opened:
            assert name in opened.keys() and opened.metadata() == {"format": "pt"}
    for name in ("tokenizer.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    stated = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    ignored = stated["modules_to_not_convert" if format == "deepseek" else "ignore"]
    linears = {n for n, m in qwen3_moe().named_modules() if isinstance(m, torch.nn.Linear)}
    assert linears | {"lm_head", "model.layers.0.mlp.gate"} <= set(ignored)
    assert not [name for name in ignored if "experts" in name]
    if format == "modelopt":
        other = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
        assert other["quant_algo"] == stated["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
        assert other["exclude_modules"] == ignored


def test_gate_and_up_share_their_scale(tmp_path):
    """Readers keep both in one matrix; also where one of them is 100 times smaller."""
    model = qwen3_moe()
    with torch.no_grad():
        model.get_submodule(LAYER).gate_up_proj[:, :128] /= 100
    source = save(model, tmp_path / "source")
    for scheme, name in (("nvfp4", "weight_global_scale"), ("fp8_tensor", "weight_scale")):
        quantize(source, tmp_path / scheme, scheme)
        after = tensors(tmp_path / scheme)
        gate, up, down = (after[f"{LAYER}.2.{part}_proj.{name}"] for part in ("gate", "up", "down"))
        assert torch.equal(gate, up) and not torch.equal(up, down)


def test_one_file_without_an_index(source, tmp_path):
    single = save(qwen3_moe(), tmp_path / "single", shards=False)
    quantize(single, tmp_path / "a", "nvfp4_a16")
    quantize(source, tmp_path / "b", "nvfp4_a16")
    assert not (tmp_path / "a" / INDEX).exists()
    one, many = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert one.keys() == many.keys()
    assert all(torch.equal(as_bytes(one[name]), as_bytes(many[name])) for name in one)


def test_one_expert_at_a_time(tmp_path):
    """In one file of two layers of 32 experts, little more than an expert is in memory."""
    model = qwen3_moe(num_experts=32)
    source = save(model, tmp_path / "source", shards=False)
    expert = 3 * 128 * 128 * 2  # bytes
    with LiveBytes() as memory:
        quantize(source, tmp_path / "out", "nvfp4")
    assert expert < memory.most < 16 * expert  # errors are summed in fp64
    assert memory.most < (source / "model.safetensors").stat().st_size / 4


def test_fused_experts_of_llama4_become_linears(tmp_path):
    """As compressed-tensors has them; the transposition is read off the shapes."""
    source = save(llama4(), tmp_path / "source")
    fused = tensors(source)
    name = "model.layers.0.feed_forward.experts"
    assert fused[f"{name}.gate_up_proj"].shape == (4, 128, 256)
    report = quantize(source, tmp_path / "out", "fp8_channel")
    assert list(report.errors) == [f"model.layers.{i}.feed_forward.experts" for i in range(2)]
    after = tensors(tmp_path / "out")
    assert f"{name}.gate_up_proj" not in after
    want = tmoe.quantize(fused[f"{name}.gate_up_proj"][3].t()[128:], "fp8_channel")
    assert torch.equal(after[f"{name}.3.up_proj.weight"].float(), want.data.float())
    assert torch.equal(after[f"{name}.3.up_proj.weight_scale"], want.scale[:, None])
    with pytest.raises(ValueError, match="use compressed-tensors"):
        quantize(source, tmp_path / "b", "nvfp4", "modelopt")


@pytest.mark.parametrize(("scheme", "format"), [("fp8_block", "deepseek"), ("nvfp4", "modelopt")])
def test_experts_in_one_tensor_become_linears(scheme, format, source, tmp_path):
    """The same files' contents, whichever way the source has them."""
    fused = tmp_path / "fused"
    qwen3_moe().save_pretrained(fused, save_original_format=False, max_shard_size="300KB")
    assert f"{LAYER}.gate_up_proj" in tensors(fused)
    quantize(fused, tmp_path / "a", scheme, format)
    quantize(source, tmp_path / "b", scheme, format)
    one, each = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert one.keys() == each.keys()
    assert all(torch.equal(as_bytes(one[name]), as_bytes(each[name])) for name in one)


def test_command(source, tmp_path):
    out = str(tmp_path / "out")
    done = CliRunner().invoke(app, ["quantize", str(source), out, "--scheme", "nvfp4", "--json"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["format"] == "compressed-tensors" and printed["written"] == 8
    assert 15 < printed["errors"][LAYER]["down_proj"]["snr_db"] < 25
    done = CliRunner().invoke(app, ["quantize", str(source), out, "--scheme", "fp8_block"])
    assert done.exit_code == 1 and "begun with scheme nvfp4" in done.output
    for wrong, match in (
        (["--scheme", "nvfp5"], "nvfp5"),
        (["--scheme", "fp8_tensor", "--format", "modelopt"], "calibration"),
        (["--scheme", "nvfp4", "--device", "nonsense"], "nonsense"),
    ):
        done = CliRunner().invoke(app, ["quantize", str(source), out, *wrong])
        assert done.exit_code == 2 and match in done.output
