"""What a format costs the demo's model: the measurement, not its numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from transformers.integrations.moe import ExpertsInterface  # noqa: E402

from tmoe.demo import bits_per_byte as module  # noqa: E402
from tmoe.demo.checkpoint import load  # noqa: E402
from tmoe.formats import SCHEMES  # noqa: E402


def test_only_the_rounding_differs(monkeypatch):
    """With a rounding that changes nothing, the experts are those of transformers."""
    monkeypatch.setattr(module, "rounded", lambda x, choice: x)
    model = load(torch.device("cpu"), torch.float32)
    ids = torch.randint(0, 256, (2, 20))
    before = model(input_ids=ids).logits
    module.quantise_weights(model, {})
    ExpertsInterface.register("tmoe_quantised", partial(module.experts_forward, {}))
    model.set_experts_implementation("tmoe_quantised")
    torch.testing.assert_close(model(input_ids=ids).logits, before)


def test_every_scheme_is_measured():
    """Fewer bits can't be free: 4-bit activations cost more than 8-bit ones, weights alone less."""
    scores = module.measure(4096, torch.device("cpu"))
    assert scores.keys() == {"fp32", *module.SCHEMES}
    both = {name: row["weights and activations"] for name, row in scores.items()}
    assert all(0.5 < score < 4 for score in both.values())
    assert both["fp32"] < both["mxfp4, mxfp8"] < both["mxfp4"]
    assert scores["mxfp4"]["weights"] == scores["mxfp4, mxfp8"]["weights"] < both["mxfp4"]


@torch.no_grad()
def test_layers_come_to_what_is_done_by_hand():
    """No scheme loses more than its rounding: mxfp4 and nvfp4 among them."""
    device = torch.device("cpu")
    by_hand, layers = module.measure(1024, device), module.measure_layers(1024, device)
    assert layers.keys() == SCHEMES.keys()
    for scheme, (row, column) in module.BY_HAND.items():
        assert layers[scheme] == pytest.approx(by_hand[row][column], abs=2e-4), scheme
