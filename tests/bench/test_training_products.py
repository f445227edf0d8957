"""The benchmark of a training step's products: each is what its name says, on a tiny layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import training_products
from bench.training_products import Layer, measure
from tmoe.kernels.backward_tiles import GradientTile
from tmoe.kernels.tiles import Tile
from tmoe.shapes import MoEShape


@pytest.fixture
def layer(monkeypatch, device):
    monkeypatch.setattr(training_products, "DEVICE", device)
    monkeypatch.setattr(training_products, "DTYPE", torch.float32)
    monkeypatch.setattr(training_products, "PRODUCTS", (Tile(16, 32, 32, 4, 2),))
    monkeypatch.setattr(training_products, "GRADIENTS", (GradientTile(32, 32, 16, 4, 2),))
    monkeypatch.setattr(training_products, "FROZEN", (Tile(16, 32, 32, 4, 2),))
    monkeypatch.setattr(training_products, "through_tiles", lambda n: [Tile(16, n, 32, 4, 2)])
    monkeypatch.setattr(
        training_products, "factor_tiles", lambda thin, _: [GradientTile(thin, thin, 16, 4, 2)]
    )
    monkeypatch.setattr(training_products, "time_us", lambda call: 1.0)
    return Layer(MoEShape("tiny", 4, 2, 64, 32), 24)


def test_products_are_checked_and_timed(layer):
    names = []
    for product in (*layer.products(), *layer.of_adapters(4), *layer.through_codes("nvfp4_a16")):
        names.append(product.name)
        (dense, us), *tiles = measure(product)
        assert dense == "torch's dense matmul" and us == 1 and 2 <= len(tiles) <= 4
        if product.grouped_mm is not None:
            theirs = product.grouped_mm()
            torch.testing.assert_close(
                product.part(theirs), product.left @ product.right, rtol=1e-4, atol=1e-4
            )
    assert names[:8] == [
        "gate_up, gathered", "gate_up, permuted", "down", "d_activated, gathered",
        "d_activated, permuted", "d_rows", "d_down", "d_gate_up",
    ]  # fmt: skip
    assert len(names) == len(set(names)) == 8 + 4 + 2


def test_a_wrong_product_is_not_timed(layer):
    product = next(layer.products())
    wrong = replace(product, run=lambda tile: product.run(tile) * 1.1)
    timed = measure(wrong)
    assert next(timed)[0] == "torch's dense matmul" and next(timed)[0] == "torch's grouped_mm"
    with pytest.raises(AssertionError, match="error"):
        next(timed)
