"""Layers with quantised experts: made from others, saved and loaded, and what they refuse."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tmoe
from tmoe.formats import SCHEMES, QuantizedTensor

ROUTING = tmoe.Routing(4, 2, "Renormalize")


def make_layer(**options):
    return tmoe.MoE(64, 32, ROUTING, shared_intermediate_size=16, **options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized(scheme):
    """The layer computes what the op computes with the quantised weights."""
    layer = make_layer(bias=True)
    quantized = tmoe.MoE.quantized(layer, scheme)
    experts = quantized.experts
    assert experts.scheme == scheme and quantized.gate is layer.gate
    assert not isinstance(layer.experts.down_proj, QuantizedTensor)
    recipe = SCHEMES[scheme].weights[0]
    want = tmoe.quantize(
        layer.experts.down_proj.detach(), recipe.format.name, block_shape=recipe.block_shape
    )
    assert torch.equal(experts.down_proj, want)
    x = torch.randn(6, 64)
    with torch.no_grad():
        y = quantized(x)
        _, weights, ids = layer.gate(x)
        got = tmoe.fused_experts(
            x, experts.gate_up_proj, experts.down_proj, weights, ids, scheme=scheme,
            gate_up_bias=experts.gate_up_proj_bias, down_bias=experts.down_proj_bias,
        )  # fmt: skip
        assert torch.equal(y, got + layer.shared_expert(x))
        error = (y - layer(x)).norm() / layer(x).norm()
    assert error < (0.3 if "4" in scheme.split("_")[0] else 0.06)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_built_with_a_scheme(scheme):
    layer = make_layer(scheme=scheme, dtype=torch.bfloat16)
    assert isinstance(layer.experts.gate_up_proj, QuantizedTensor)
    assert layer.experts.gate_up_proj.dequantize().std() > 0.01
    with torch.no_grad():
        y = layer(torch.randn(3, 5, 64, dtype=torch.bfloat16))
    assert y.shape == (3, 5, 64) and y.isfinite().all()
    assert scheme in repr(layer)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if SCHEMES[name].takes_scales])
def test_static_scales(scheme, tmp_path):
    """They are used, saved, and stay fp32; both forms, one number and one per expert."""
    layer, x = make_layer().requires_grad_(False), torch.randn(6, 64)
    scales = {"input_scale": torch.tensor(0.0101), "hidden_scale": torch.linspace(0.011, 0.02, 4)}
    quantized = tmoe.MoE.quantized(layer, scheme, **scales)
    experts = quantized.experts
    _, weights, ids = layer.gate(x)
    with torch.no_grad():
        want = tmoe.fused_experts(
            x, experts.gate_up_proj, experts.down_proj, weights, ids, scheme=scheme, **scales
        )
        assert torch.equal(quantized(x), want + layer.shared_expert(x))
        assert not torch.equal(quantized(x), tmoe.MoE.quantized(layer, scheme)(x))
    empty = {name: torch.zeros_like(scale) for name, scale in scales.items()}
    again = tmoe.Experts(4, 64, 32, scheme=scheme, **empty)
    torch.save(experts.state_dict(), tmp_path / "experts.pt")
    again.load_state_dict(torch.load(tmp_path / "experts.pt", weights_only=True))
    assert torch.equal(again(x, ids, weights), want)
    again.to(torch.bfloat16)
    for name, scale in scales.items():
        assert torch.equal(getattr(again, name), scale)
    assert tmoe.explain(again).problem.has_static_scales
    assert not tmoe.explain(tmoe.Experts(4, 64, 32, scheme=scheme)).problem.has_static_scales


def test_static_scales_that_do_not_fit():
    one = torch.ones(())
    with pytest.raises(ValueError, match="Experts: input_scale must be None for mxfp8"):
        tmoe.Experts(4, 64, 32, scheme="mxfp8", input_scale=one)
    with pytest.raises(ValueError, match="hidden_scale must be None for bf16"):
        tmoe.Experts(4, 64, 32, hidden_scale=one)
    with pytest.raises(ValueError, match=r"must be one number or of shape \(4,\), got \(3,\)"):
        tmoe.Experts(4, 64, 32, scheme="nvfp4", input_scale=torch.ones(3))
    with pytest.raises(TypeError, match="Experts: input_scale must be a Tensor, got float"):
        tmoe.Experts(4, 64, 32, scheme="nvfp4", input_scale=1.0)


def test_state_dict_copies_and_devices(tmp_path):
    layer = tmoe.MoE.quantized(make_layer(), "nvfp4")
    x = torch.randn(4, 64)
    with torch.no_grad():
        want = layer(x)
        other = make_layer(scheme="nvfp4")
        other.load_state_dict(layer.state_dict())
        torch.save(layer.state_dict(), tmp_path / "layer.pt")
        loaded = make_layer(scheme="nvfp4", device="meta")
        loaded.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True), assign=True)
        for twin in (other, loaded, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(x), want)
    names = [name for name, _ in layer.named_parameters()]
    assert "experts.gate_up_proj" in names and "experts.down_proj" in names


def test_it_says_what_runs_and_is_frozen():
    layer = tmoe.MoE.quantized(make_layer(), "fp8_block")
    with torch.no_grad():
        decision = tmoe.explain(layer)
        assert "fp8_block" in str(decision) and decision.chosen == "torch"
    x = torch.randn(2, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.any() and layer.experts.down_proj.grad is None
    with pytest.raises(ValueError, match="train adapters on it"):
        layer.requires_grad_(True)
    with pytest.raises(ValueError, match="scheme must be"):
        make_layer(scheme="int3")
