"""What is looked at when a page has run, beside what it says itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.docs.run_page import Run


def transformers(run: Run) -> None:
    from tmoe.checkpoints.input_ranges import InputRanges

    assert "2 experts modules quantised to nvfp4" in run.printed
    assert len(InputRanges.load(run.folder / "ranges.safetensors").layers) == 2


def training(run: Run) -> None:
    import torch

    assert (run.folder / "adapter" / "adapter_config.json").exists()
    experts = run.names["layer"].experts
    assert experts.gate_up_proj.main_grad.any() and experts.down_proj.main_grad.any()
    trained = {n: p for n, p in run.names["model"].named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert all(p.grad is not None for p in trained.values())
    assert all(torch.isfinite(p.grad).all() for p in trained.values())


def checkpoints(run: Run) -> None:
    assert "2 MoE layers run on tmoe" in run.printed
    assert "QuantizedTensor(fp8_block" in run.printed


def readme(run: Run) -> None:
    assert "MoE layers run on tmoe" in run.printed


AFTERWARDS: dict[str, Callable[[Run], None]] = {
    "README.md": readme,
    "docs/checkpoints.md": checkpoints,
    "docs/training.md": training,
    "docs/transformers.md": transformers,
}


def look_at(run: Run) -> None:
    AFTERWARDS.get(run.page, lambda _: None)(run)
