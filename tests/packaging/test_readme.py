"""The README's Python runs as it stands, with a tiny random model instead of the downloaded one."""

from __future__ import annotations

import re
import sys

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import tmoe
from tests.packaging.conftest import ROOT, run
from tmoe.dispatch import measure

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.fixture
def tiny_model(monkeypatch):
    config = Qwen3MoeConfig(
        vocab_size=10_000,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )

    def from_pretrained(name, **kwargs):
        return AutoModelForCausalLM.from_config(config).eval()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    # docs/checkpoints.md has the same call, and its test a checkpoint on disk
    monkeypatch.setattr(tmoe, "from_pretrained", from_pretrained)
    # nobody looks at the times that autotune takes, and an interpreted layer needs seconds
    monkeypatch.setattr(measure, "WARM_UPS", 1)
    monkeypatch.setattr(measure, "REPEATS", 1)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_block_runs(tiny_model, one_rank, capsys):
    names: dict[str, object] = {}
    printed = ""
    for block in BLOCKS:
        if "TRITON_INTERPRET" in block:  # takes effect in a new process only
            printed += run(sys.executable, "-c", block, cwd=ROOT)
        else:
            block = block.replace('"cuda", (8,)', '"cpu", (1,)')  # ranks of a mesh
            exec(compile(block, "README.md", "exec"), names)
    printed += capsys.readouterr().out
    assert "MoE layers run on tmoe" in printed
    assert "tensor([0, 2, 3, 6]" in printed and "tensor([1, 4, 3, 0, 2, 5]" in printed
