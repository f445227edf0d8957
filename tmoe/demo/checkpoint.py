"""The trained model that ships with the package."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeForCausalLM

MODEL_DIR = Path(__file__).parent / "model"


def load(device: torch.device, dtype: torch.dtype, folder: Path = MODEL_DIR) -> Qwen3MoeForCausalLM:
    """The demo's model, ready for inference. `tmoe.demo.train` made it; nothing is downloaded."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    model.to(device)  # type: ignore[arg-type]  # transformers wraps it without its signature
    return model.eval().requires_grad_(False)
