"""Tiny checkpoints with experts, as transformers writes them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Llama4TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM

SIZES = dict(
    vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, num_experts_per_tok=2, max_position_embeddings=64,
)  # fmt: skip


def qwen3_moe(**overrides) -> nn.Module:
    """Four experts of 128 a layer; on disk a tensor for each linear."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES | dict(moe_intermediate_size=128, num_experts=4, intermediate_size=64) | overrides
    )
    return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def llama4() -> nn.Module:
    """On disk tensors of all experts, transposed."""
    torch.manual_seed(0)
    config = Llama4TextConfig(
        **SIZES | dict(num_experts_per_tok=1), intermediate_size=128, intermediate_size_mlp=64,
        num_local_experts=4,
    )  # fmt: skip
    model = Llama4ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.05)
    return model


def save(model: nn.Module, folder: Path, shards: bool = True) -> Path:
    """Write it, over eight files or one, with a file that isn't weights."""
    model.save_pretrained(folder, max_shard_size="150KB" if shards else "1GB")
    (folder / "tokenizer.json").write_text('{"not": "weights"}\n')
    return folder


def gpt_oss() -> nn.Module:
    """On disk tensors of all experts, transposed, gate and up interleaved, with biases."""
    torch.manual_seed(0)
    config = GptOssConfig(
        **SIZES | dict(head_dim=64), intermediate_size=96, num_local_experts=4, sliding_window=16
    )
    return GptOssForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
