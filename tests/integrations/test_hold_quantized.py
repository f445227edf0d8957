"""Quantised weights inside transformers' experts modules: same names, right numbers, lasting."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import tmoe
from tests.integrations.counting import CountOps
from tests.integrations.families import BY_NAME
from tests.integrations.family import outputs
from tmoe.formats import SCHEMES, QuantizedTensor
from tmoe.integrations.transformers.quantized import (
    hold_quantized,
    is_transposed,
    scheme_of,
    weight_names,
)
from tmoe.integrations.transformers.switch import expert_modules

FAMILIES = [
    "mixtral", "aria_text", "gpt_oss", "openai_privacy_filter", "nemotron_h", "muse_spark_text",
    "inkling2_text", "llama4_text", "longcat_flash", "jetmoe", "step3p7_text",
]  # fmt: skip


def quantize(weight: torch.Tensor, scheme: str) -> QuantizedTensor:
    recipe = SCHEMES[scheme].weights[0]
    return tmoe.quantize(weight.detach(), recipe.format.name, block_shape=recipe.block_shape)


def hold_everywhere(model: nn.Module, scheme: str, **scales) -> None:
    for _, experts in expert_modules(model):
        gate_up, down = (experts.get_parameter(name) for name in weight_names(experts))
        if is_transposed(experts):
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        q = (quantize(gate_up[: len(down)], scheme), quantize(down, scheme))
        hold_quantized(experts, *q, scheme, **scales)


def dequantized(quantized: nn.Module, plain: nn.Module) -> nn.Module:
    """`plain` with the values of `quantized`."""
    held = dict(quantized.named_parameters())
    for name, parameter in plain.named_parameters():
        if isinstance(held[name], QuantizedTensor):
            values = held[name].dequantize()
            same = parameter[: len(values)]
            same.data.copy_(values if values.shape == same.shape else values.transpose(1, 2))
    return plain


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_computes_with_the_held_values(name):
    """Weight-only, so the truth is transformers' own model with the dequantised weights."""
    plain = BY_NAME[name].build()
    model = copy.deepcopy(plain)
    keys = list(model.state_dict())
    tmoe.replace_moe(model)
    hold_everywhere(model, "mxfp4_a16")
    assert list(model.state_dict()) == keys
    held = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
    assert len(held) == 2 * BY_NAME[name].layers
    with torch.no_grad():
        with CountOps() as ops:
            got = outputs(model)
        assert ops.calls["quantized_experts"] + ops.calls["quantized_grouped_gemm"] > 0
        assert not ops.calls["fused_experts"] and not ops.calls["grouped_gemm"]
        before = outputs(plain)
        want = outputs(dequantized(model, plain))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (want - before).abs().max() > 1e-2  # the quantised values do reach the output


def replaced(name: str, scheme: str, **scales) -> nn.Module:
    model = BY_NAME[name].build()
    tmoe.replace_moe(model)
    hold_everywhere(model, scheme, **scales)
    return model


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "muse_spark_text"])
def test_copies_pickles_and_state_dicts_keep_everything(name):
    scale = torch.rand(8) + 0.5
    model = replaced(name, "fp8_tensor", input_scale=scale, hidden_scale=torch.tensor(0.3))
    with torch.no_grad():
        want = outputs(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        others = [copy.deepcopy(model), torch.load(saved, weights_only=False)]
        other = replaced(name, "fp8_tensor", input_scale=scale * 2, hidden_scale=torch.ones(()))
        assert not torch.equal(outputs(other), want)  # the static scales are used
        others.append(other)
        other.load_state_dict(model.state_dict())
        for other in others:
            assert torch.equal(outputs(other), want)


def test_static_scales_stay_fp32():
    model = replaced("mixtral", "nvfp4", input_scale=torch.full((8,), 1.001)).bfloat16()
    experts = next(module for _, module in expert_modules(model))
    held = scheme_of(experts)
    assert held.input_scale.dtype == torch.float32 and held.input_scale[0] == torch.tensor(1.001)
    assert experts.down_proj.dtype == torch.bfloat16  # nominal
    assert "(tmoe_scheme): HeldScheme(nvfp4, input_scale)" in str(model)
    with torch.no_grad():
        assert outputs(model).isfinite().all()


def test_all_else_trains_around_them():
    model = replaced("mixtral", "nvfp4")
    outputs(model).square().sum().backward()
    codes = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
    others = [p for p in model.parameters() if not isinstance(p, QuantizedTensor)]
    assert codes and all(p.grad is None for p in codes)
    assert all(p.grad.isfinite().all() and p.grad.any() for p in others)
    model.set_experts_implementation("eager")  # the loop would multiply by something else
    with torch.no_grad(), pytest.raises(NotImplementedError, match="dequantize"):
        outputs(model)


def test_what_does_not_fit_is_refused_and_nothing_changes():
    model = BY_NAME["mixtral"].build()
    tmoe.replace_moe(model)
    experts = next(module for _, module in expert_modules(model))
    good = [quantize(experts.get_parameter(name), "nvfp4") for name in weight_names(experts)]
    before = dict(experts.named_parameters())
    for weights, scheme, options, match in [
        (good[::-1], "nvfp4", {}, r"gate_up_proj must be of shape \(8, 96, 64\)"),
        (good, "fp8_block", {}, "gate_up_proj must be fp8_block"),
        (good, "nvfp5", {}, "scheme must be"),
        ((good[0], experts.down_proj), "nvfp4", {}, "down_proj must be a QuantizedTensor"),
        (good, "nvfp4_a16", {"input_scale": torch.ones(())}, "input_scale must be None"),
        (good, "nvfp4", {"hidden_scale": torch.ones(3)}, r"hidden_scale must be .* \(8,\)"),
    ]:
        with pytest.raises((TypeError, ValueError), match=match):
            hold_quantized(experts, *weights, scheme, **options)
    parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    with pytest.raises(ValueError, match="down_proj is parametrised"):
        hold_quantized(experts, *good, "nvfp4")
    parametrize.remove_parametrizations(experts, "down_proj")
    assert dict(experts.named_parameters()).keys() == before.keys()
    assert all(not isinstance(p, QuantizedTensor) for p in experts.parameters())

    dbrx = BY_NAME["dbrx"].build()
    tmoe.replace_moe(dbrx)
    with pytest.raises(ValueError, match="separate parameters"):
        hold_quantized(next(module for _, module in expert_modules(dbrx)), *good, "nvfp4")
