"""A fine-tune of the demo's model: on tmoe it ends where it ends on transformers' own experts."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.integrations.counting import CountOps
from tmoe.demo import text, train
from tmoe.demo.checkpoint import load

WINDOW = 48


def fine_tune(data, steps, *, on_tmoe):
    """The losses of each step, with the load-balancing loss in them."""
    model = load(torch.device("cpu"), torch.float32).train().requires_grad_(True)
    model.set_experts_implementation("eager")
    if on_tmoe:
        tmoe.replace_moe(model)
    optimizer = train.MasterWeights(model, 3e-4)
    draw, losses = torch.Generator().manual_seed(0), []
    for step in range(steps):
        start = torch.randint(len(data) - WINDOW, (1, 1), generator=draw)
        ids = data[start + torch.arange(WINDOW)].long()
        output = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
        output.loss.backward()
        optimizer.step((step + 1) / (steps + 1))
        losses.append(output.loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_the_same_loss_as_eager(steps):
    data = text.as_bytes(text.read_text(text.stdlib_dir(), held_out=False)[:200_000])
    want = fine_tune(data, steps, on_tmoe=False)
    with CountOps() as ops:
        got = fine_tune(data, steps, on_tmoe=True)
    assert ops.calls["fused_experts_train"] == 4 * steps
    torch.testing.assert_close(got[-10:].mean(), want[-10:].mean(), rtol=5e-4, atol=0)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0)
