"""A family of transformers as a tiny random model, and what a test does with one."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

TRANSFORMERS = Version(transformers.__version__)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# What a config is given where it has the field: hidden 64, 2 layers, 8 experts, 4 per token.
COMMON = dict(
    vocab_size=128, hidden_size=64, num_hidden_layers=2, num_layers=2, max_position_embeddings=256,
    intermediate_size=48, moe_intermediate_size=48, expert_ffn_hidden_size=48, ffn_hidden_size=48,
    shared_expert_intermediate_size=32, moe_shared_expert_intermediate_size=32,
    shared_intermediate_size=32,
    num_experts=8, num_local_experts=8, n_routed_experts=8, moe_num_experts=8,
    num_experts_per_tok=4, top_k_experts=4, moe_k=4, moe_topk=4, num_experts_per_token=4,
    first_k_dense_replace=1, n_group=2, topk_group=1,
    num_attention_heads=4, num_key_value_heads=4, head_dim=16, attention_dropout=0.0,
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    index_head_dim=16, index_n_heads=2, index_topk=64,
    linear_num_key_heads=2, linear_num_value_heads=2,
    linear_key_head_dim=16, linear_value_head_dim=16,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
IDS = torch.randint(3, 120, (2, 19), generator=torch.Generator().manual_seed(2)).to(DEVICE)


@dataclass(frozen=True)
class Family:
    """One model type: `cls` in `module`, a folder of transformers.models, and config overrides.

    `layers` MoE modules are replaced; for their experts a forward on text calls `ops` tmoe
    operations, one per module where the experts are fused, more where they are not, and one for
    each of `routers` routers. `since` is the first of the two supported ends of the version range
    (5.17, 5.24) that has it.
    """

    name: str
    cls: str
    overrides: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    ops: int | None = None
    routers: int | None = None
    module: str | None = None
    config: str | None = None
    since: str = "5.17"
    on_interface: bool = True
    # Where a test finds the routes of a run in bf16: in the arguments of the "experts", in what the
    # "router" returns, or nowhere.
    routes: str = "experts"

    def __str__(self) -> str:
        return self.name

    def need(self) -> None:
        """Skip the test where this transformers lacks the family."""
        if Version(self.since) > TRANSFORMERS:
            pytest.skip(f"{self.name} came with transformers {self.since}")

    @property
    def expected_routers(self) -> int:
        return self.layers if self.routers is None else self.routers

    @property
    def expected_ops(self) -> int:
        return (self.layers if self.ops is None else self.ops) + self.expected_routers

    def build(self) -> nn.Module:
        """The model in eval mode, fp32, matrices with a standard deviation of 1/sqrt(last size)."""
        self.need()
        module = self.module or self.name
        cls = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), self.cls)
        config_class = cls.config_class
        if self.config is not None:
            config_class = getattr(transformers, self.config)
        known = getattr(config_class, "__dataclass_fields__", {})
        config = config_class(**{k: v for k, v in COMMON.items() if k in known} | self.overrides)
        return randomized(cls(config).eval()).to(DEVICE)


def randomized(model: nn.Module) -> nn.Module:
    """Matrices with a standard deviation of 1/sqrt(last size), so that every layer matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def outputs(model: nn.Module, **inputs: Any) -> Tensor:
    """Logits, or the last hidden states of a model without a head."""
    if type(model).__name__ == "Qwen3OmniMoeTalkerModel":  # which is given embeddings
        result = model(inputs_embeds=model.get_input_embeddings()(IDS), **inputs)
    else:
        result = model(input_ids=IDS, **inputs)
    return result.logits if "logits" in result else result.last_hidden_state
