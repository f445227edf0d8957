"""Quantising models on a GPU: the same bits as on a CPU, and the memory that it takes."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import tmoe
from tests.checkpoints.tiny_models import qwen3_moe, save
from tmoe.checkpoints import quantize_checkpoint
from tmoe.formats import SCHEMES, QuantizedTensor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_place(scheme, device):
    """And the model runs on the kernels afterwards, in a sensible distance of what it was."""
    here, there = qwen3_moe(), qwen3_moe().to(device)
    ids = torch.arange(48, device=device).view(2, 24)
    with torch.no_grad():
        before = there(ids).logits.float()
    tmoe.replace_moe(here, scheme)
    report = tmoe.replace_moe(there, scheme)
    assert len(report.errors) == 2
    others = dict(here.named_parameters())
    for name, parameter in there.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            assert parameter.device.type == "cuda"
            assert torch.equal(parameter.to("cpu"), others[name])
    with torch.no_grad(), tmoe.options(backend="triton"):
        after = there(ids).logits.float()
    assert 0 < (after - before).norm() / before.norm() < 0.5


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel", "mxfp4_a16", "nvfp4"])
def test_on_disk(scheme, device, tmp_path):
    source = save(qwen3_moe(), tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "cpu", scheme)
    quantize_checkpoint(source, tmp_path / "gpu", scheme, device=device)
    files = [file.name for file in (tmp_path / "cpu").glob("*.safetensors")]
    assert len(files) == 8
    for name in (*files, "config.json", "model.safetensors.index.json"):
        assert (tmp_path / "cpu" / name).read_bytes() == (tmp_path / "gpu" / name).read_bytes()


def test_memory(device):
    """Eight layers of 64 experts, 0.8 GB: beside the model one quantised layer and one expert."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=1024, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, moe_intermediate_size=256, num_experts=64,
        num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    layer = 64 * 3 * 256 * 1024 * 2  # bytes
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    tmoe.replace_moe(model, "nvfp4")
    expert = layer // 64
    assert torch.cuda.max_memory_allocated() - before < layer * 4.5 / 16 + 20 * expert
    assert torch.cuda.memory_allocated() < before - 8 * layer * 0.7
