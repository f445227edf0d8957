"""A router class of transformers: a tiny config for it, and the module with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.routing import run
from tests.routing.run import HIDDEN, E

ROOT = Path(__file__).parents[2]
# Where a newer transformers adds a family, only the pinned one has to know it.
PINNED = f"transformers=={transformers.__version__} " in (ROOT / "constraints.txt").read_text()

K = 5
SIZES = dict(
    hidden_size=HIDDEN, vocab_size=64,
    num_experts=E, num_local_experts=E, n_routed_experts=E, moe_num_experts=E,
    num_experts_per_tok=K, num_experts_per_token=K, top_k_experts=K, moe_k=K, moe_topk=K,
    n_group=1, topk_group=1, num_expert_group=1,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model type, its router class, and what decides about its recipe.

    `dtypes` are those of a model in bf16: of the logits, of the scores, of the weights. "model" is
    bf16 then. `folder` is the one of transformers.models, if not the model type's own name, and
    `config_folder` the config's, if another one.
    """

    model_type: str
    router: str
    configs: tuple[dict[str, Any], ...] = ({},)
    dtypes: tuple[str, str, str] = ("fp32", "fp32", "fp32")
    folder: str = ""
    config_folder: str = ""
    run: run.Plain = run.Plain()
    overrides: dict[str, Any] = field(default_factory=dict)  # what the config class needs
    note: str = ""

    def __str__(self) -> str:
        return f"{self.model_type}-{self.router}"

    @property
    def model_folder(self) -> str:
        return self.folder or self.model_type.removesuffix("_text")

    @property
    def source(self) -> str:
        """The modeling file."""
        return f"{self.model_folder}/modeling_{self.model_folder}.py"

    @property
    def logits_in_fp32(self) -> bool:
        """Whether the hidden states become fp32 before they meet the matrix."""
        return self.dtypes[0] == "fp32"

    def config(self, changes: dict[str, Any]) -> Any:
        """A tiny config; skips the test where an older transformers lacks the family."""
        folder = self.config_folder or self.model_folder
        for cls in vars(self._module(folder, "configuration")).values():
            if getattr(cls, "model_type", None) == self.model_type:
                known = cls.__dataclass_fields__
                sizes = {name: size for name, size in SIZES.items() if name in known}
                return cls(**sizes | self.overrides | changes)
        raise LookupError(f"no config of {self.model_type} in {folder}")

    def build(self, config: Any) -> nn.Module:
        """The router with random weights, in the default dtype where the model sets none."""
        module = self._module(self.model_folder, "modeling")
        if not hasattr(module, self.router) and not PINNED:
            pytest.skip(f"transformers {transformers.__version__} has no {self.router}")
        router = self.run.build(getattr(module, self.router), config).eval()
        with torch.no_grad():
            for parameter in router.parameters():
                parameter.normal_(0.0, HIDDEN**-0.5)
        return router

    @staticmethod
    def _module(folder: str, kind: str) -> Any:
        name = f"transformers.models.{folder}.{kind}_{folder}"
        return import_module(name) if PINNED else pytest.importorskip(name)
