"""transformers' Trainer on replaced models: the losses of eager, under the settings in common use.

The load-balancing loss is part of every loss here, where the family has one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import tmoe
from tests.integrations.counting import CountOps
from tests.integrations.families import BY_NAME

pytest.importorskip("accelerate")

SIX = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "llama4_text"]
SETTINGS = {
    "accumulation-and-clipping": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant-checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "bf16-autocast": {"bf16": True},
}
STEPS = 4


class Sequences(Dataset):
    ids = torch.randint(3, 120, (16, 12), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train(
    name: str, folder: Any, on: str, every_expert: bool = False, **settings: Any
) -> tuple[list[float], nn.Module]:
    """The loss and the norm of the gradient after each step, and the trained model."""
    torch.manual_seed(0)
    family = BY_NAME[name]
    if settings.get("bf16", every_expert):  # a route that a rounding flips would hide all the rest
        every = {"num_experts_per_tok": 8, "n_group": 1}
        family = replace(family, overrides=family.overrides | every)
    model = family.build()
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = True
    if BY_NAME[name].on_interface:
        model.set_experts_implementation("eager")
    if on == "tmoe":
        tmoe.replace_moe(model)
    return train_model(model, folder, **settings), model


def train_model(model: nn.Module, folder: Any, **settings: Any) -> list[float]:
    """The loss and the norm of the gradient after each step."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        **settings,
    )
    trainer = Trainer(model, arguments, train_dataset=Sequences())
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [entry[key] for entry in logs for key in ("loss", "grad_norm")]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", SIX)
def test_same_losses_as_eager(name, settings, tmp_path):
    want, eager = train(name, tmp_path, "eager", **SETTINGS[settings])
    with CountOps() as ops:
        got, model = train(name, tmp_path, "tmoe", **SETTINGS[settings])
    assert ops.calls["fused_experts_train"] >= STEPS and len(got) == 2 * STEPS
    if settings == "bf16-autocast":
        exact, _ = train(name, tmp_path, "eager", every_expert=True)
        bf16, own = (
            torch.tensor([a / b for a, b in zip(run, exact, strict=True)]) - 1
            for run in (got, want)
        )
        assert bf16.norm() <= 2 * own.norm()
        return
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=0)
    for (key, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        # Adam's first steps have the size of the learning rate whatever the gradient's is.
        assert (mine - theirs).norm() <= 1e-2 * theirs.norm() + 1e-4, key


def test_torch_compile(tmp_path):
    want, _ = train("qwen3_moe", tmp_path, "eager")
    torch._dynamo.reset()
    got, _ = train("qwen3_moe", tmp_path, "tmoe", torch_compile_backend="aot_eager")
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=0)
