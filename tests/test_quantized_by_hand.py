"""Quantised layers small enough to work out: one token, one expert, numbers that formats hold."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.reference import quantized
from tmoe.formats import SCHEMES


@pytest.fixture(autouse=True)
def on_device(device):
    with device:
        yield


def of_one_expert(scheme, gate, up, down):
    """Weights from one column of gate and one of up, (I,), on x[0], and a diagonal `down`."""
    recipe = SCHEMES[scheme].weights[0]
    gate_up = torch.zeros(1, 2 * len(gate), 16)
    gate_up[0, :, 0] = torch.cat((gate, up))
    return [quantized(w, recipe) for w in (gate_up, down.diag_embed()[None])]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weight_on_input_by_hand(scheme, backend):
    """SC07: silu(.5 · 2) is .7311; .3655 would be the weight twice, 1.7616 on the output."""
    one = torch.ones(16)
    weights = of_one_expert(scheme, one, one, one)
    x = torch.zeros(1, 16)
    x[0, 0] = 2
    half, ids = torch.full((1, 1), 0.5), torch.zeros(1, 1, dtype=torch.int64)
    y = tmoe.fused_experts(x, *weights, half, ids, scheme=scheme, weight_on_input=True)
    torch.testing.assert_close(y, torch.full_like(y, 0.7311), rtol=0.04, atol=0)


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "fp8_block", "mxfp8"])
def test_the_clamp_comes_before_the_quantiser(scheme, backend):
    """WL05, WL07: silu(10) · -10 everywhere; an outlier in front of the clamp leaves no trace."""
    gate, one = torch.full((16,), 16.0), torch.ones(16)
    gate[3] = 1024
    weights = of_one_expert(scheme, gate, -gate.clamp(max=16), one)
    x = torch.zeros(1, 16)
    x[0, 0] = 1
    once, ids = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    activation = tmoe.Activation("swiglu", limit=10.0)
    y = tmoe.fused_experts(x, *weights, once, ids, scheme=scheme, activation=activation)
    torch.testing.assert_close(y, torch.full_like(y, -99.995), rtol=0.04, atol=0)
    torch.testing.assert_close(y, y[:, :1].expand_as(y), rtol=0, atol=0)
