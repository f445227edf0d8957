"""Written checkpoints are read by the libraries whose formats they are, with our values."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from tests.checkpoints.tiny_models import qwen3_moe, save
from tmoe.checkpoints import Checkpoint, quantize_checkpoint, read_experts
from tmoe.checkpoints.write_formats import WRITTEN

LAYER = "model.layers.1.mlp.experts"
SIZES = dict(moe_intermediate_size=256)  # two blocks of 128 in a row


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save(qwen3_moe(**SIZES), tmp_path_factory.mktemp("source"))


def ours(folder: Path, scheme: str) -> dict[str, torch.Tensor]:
    """The values of a layer's weights as tmoe's reader has them, fp32."""
    read = read_experts(Checkpoint(folder), LAYER, scheme=scheme)
    return {n: getattr(read, n).dequantize() for n in ("gate_up_proj", "down_proj")}


def linears(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each linear of the layer, by the linear's name."""
    checkpoint, found = Checkpoint(folder), {}
    for name in checkpoint:
        if name.startswith(LAYER):
            linear, _, part = name.rpartition(".")
            found.setdefault(linear, {})[part] = checkpoint.tensor(name)
    return found


def of_linear(values: dict[str, torch.Tensor], linear: str) -> torch.Tensor:
    expert, projection = linear.removeprefix(f"{LAYER}.").split(".")
    if projection == "down_proj":
        return values["down_proj"][int(expert)]
    gate, up = values["gate_up_proj"][int(expert)].chunk(2)
    return gate if projection == "gate_proj" else up


@pytest.mark.parametrize("scheme", [s for method, s in WRITTEN if method == "compressed-tensors"])
def test_compressed_tensors_decompresses_it(scheme, source, tmp_path):
    """The 4-bit formats and MXFP8 come back in bf16, NVFP4's after other roundings than ours."""
    quantize_checkpoint(source, tmp_path / "out", scheme, format="compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    (group,) = parsed.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(parsed.format)
    values = ours(tmp_path / "out", scheme)
    for linear, state in linears(tmp_path / "out").items():
        assert set(state) == {*compressor.compression_param_names(group)}
        got, want = compressor.decompress(state, group)["weight"], of_linear(values, linear)
        assert got.abs().max() > 0
        if "nvfp4" in scheme:
            torch.testing.assert_close(got, want.bfloat16(), rtol=2**-7, atol=0)
            assert (got == want.bfloat16()).float().mean() > 0.999
        else:
            assert torch.equal(got, want.to(got.dtype))


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "fp8_a16", "mxfp4_a16"])
def test_transformers_loads_compressed_tensors(scheme, source, tmp_path):
    """Its reader of experts takes neither blocks, nor MXFP8, nor NVFP4's global scale (5.24)."""
    quantize_checkpoint(source, tmp_path / "out", scheme)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    for name, want in ours(tmp_path / "out", scheme).items():
        got = model.get_parameter(f"{LAYER}.{name}")
        assert torch.equal(got.float(), want.to(got.dtype).float())
    assert_rest_is_as_before(model)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
@pytest.mark.parametrize("fused", [False, True])
def test_transformers_loads_deepseeks_format(fused, source, tmp_path):
    """On a CPU it dequantises as it loads."""
    if fused:
        source = tmp_path / "fused"
        qwen3_moe(**SIZES).save_pretrained(source, save_original_format=False)
    quantize_checkpoint(source, tmp_path / "out", "fp8_block")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, want in ours(tmp_path / "out", "fp8_block").items():
        assert torch.equal(model.get_parameter(f"{LAYER}.{name}"), want)
    assert_rest_is_as_before(model)


def assert_rest_is_as_before(model: nn.Module) -> None:
    before = dict(qwen3_moe(**SIZES).named_parameters())
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            assert torch.equal(parameter.float(), before[name].float()), name


def test_modelopt_dequantizes_it(source, tmp_path):
    """With the class that its exporter quantises by."""
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    quantize_checkpoint(source, tmp_path / "out", "nvfp4", format="modelopt")
    values = ours(tmp_path / "out", "nvfp4")
    for linear, state in linears(tmp_path / "out").items():
        want = of_linear(values, linear)
        assert set(state) == {"weight", "weight_scale", "weight_scale_2"}
        held = qtensor.NVFP4QTensor(want.shape, torch.float32, state["weight"])
        got = held.dequantize(
            torch.float32,
            scale=state["weight_scale"],
            double_scale=state["weight_scale_2"],
            block_sizes={-1: 16},
        )
        torch.testing.assert_close(got, want, rtol=2e-7, atol=0)
