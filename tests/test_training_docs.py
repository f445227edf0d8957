"""docs/training.md: its Python runs, and it trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints.tiny_models import qwen3_moe

TEXT = (Path(__file__).parents[1] / "docs" / "training.md").read_text()


def test_the_python_runs(monkeypatch, tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    tiny = lambda *args, **kwargs: qwen3_moe(vocab_size=128)  # noqa: E731
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", tiny)
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec("\n".join(blocks), names)
    assert len(blocks) == 5 and (tmp_path / "adapter" / "adapter_config.json").exists()
    experts = names["layer"].experts
    assert experts.gate_up_proj.main_grad.any() and experts.down_proj.main_grad.any()
    trained = {n: p for n, p in names["model"].named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert all(p.grad is not None for p in trained.values())
    assert all(torch.isfinite(p.grad).all() for p in trained.values())
