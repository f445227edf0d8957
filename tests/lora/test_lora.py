"""tmoe.lora: adapters on experts begin as nothing, train alone, merge, and go to files and back."""

from __future__ import annotations

import copy

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.integrations.counting import CountOps
from tests.integrations.families import BY_NAME
from tests.integrations.family import outputs
from tests.integrations.test_training import gradients
from tests.nn.layers import CASES, H, make_layer

SIX = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "llama4_text"]
OTHERS = ["longcat_flash", "step3p7_text"]


def shaken(model):
    """Adapters that do something."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                values = torch.randn(parameter.shape, generator=generator, device="cpu")
                parameter.copy_(values * parameter.shape[-1] ** -0.5)
    return model


def of_adapters(grads):
    return {name: gradient for name, gradient in grads.items() if "lora_" in name}


@pytest.mark.parametrize("case", CASES)
def test_a_layer(case):
    """New adapters change no bit; trained ones do what merged ones do, and alone get gradients."""
    layer, x = make_layer(case).requires_grad_(False), torch.randn(24, H)
    before = layer(x)
    assert tmoe.lora.add(layer, rank=4, alpha=8) == ["experts"]
    assert torch.equal(layer(x), before)
    y = shaken(layer)(x)
    y.square().sum().backward()
    trained = {name for name, p in layer.named_parameters() if p.grad is not None}
    assert len(trained) == 4 and all("lora_" in name for name in trained)
    assert all(layer.get_parameter(name).grad.any() for name in trained)  # GR01
    weights = {n: p.clone() for n, p in layer.named_parameters()}
    tmoe.lora.merge(layer)
    merged = layer(x)
    assert_matches(y, copy.deepcopy(layer).double()(x.double()), merged)
    tmoe.lora.unmerge(layer)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter, weights[name])
    assert (merged - before).norm() > 0.1 * before.norm()


@pytest.mark.parametrize("scheme", ["fp8_a16", "mxfp4_a16", "nvfp4_a16", "fp8_block", "mxfp8"])
def test_on_quantised_experts(scheme):
    """The gradients are those on the dequantised weights; nothing is computed for the codes."""
    plain = make_layer("gated-shared").requires_grad_(False)
    layer = tmoe.MoE.quantized(plain, scheme)
    x = torch.randn(24, H)
    tmoe.lora.add(layer, rank=4)
    y = shaken(layer)(x)
    y.square().sum().backward()
    got = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    assert len(got) == 4 and all(g.any() for g in got.values())
    if not scheme.endswith("a16"):
        return
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            dequantized = getattr(layer.experts, name).dequantize()
            plain.experts.get_parameter(name).copy_(dequantized)
    tmoe.lora.add(plain, rank=4)
    plain.load_state_dict(
        {n: p for n, p in layer.state_dict().items() if "lora_" in n}, strict=False
    )
    want = plain(x)
    want.square().sum().backward()
    torch.testing.assert_close(y, want)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by", ["tmoe", "peft"])
def test_no_sum_with_the_weights_is_kept(by):
    """PEFT's own way holds a second copy of all experts' weights from forward to backward."""
    model = BY_NAME["qwen3_moe"].build().requires_grad_(False)
    tmoe.replace_moe(model)
    if by == "tmoe":
        tmoe.lora.add(model)
    else:
        peft = pytest.importorskip("peft")
        names = ["experts.gate_up_proj", "experts.down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(target_parameters=names))
    weights = {p.data_ptr() for p in model.parameters()}
    smallest = min(p.numel() for n, p in model.named_parameters() if n.endswith("down_proj"))
    kept = []
    with (
        CountOps() as ops,
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ),
    ):
        outputs(shaken(model)).sum().backward()
    assert ops.calls["frozen_experts_train"] == 2 and not ops.calls["fused_experts"] and kept
    assert all(t.numel() < smallest for t in kept if t.data_ptr() not in weights and t.ndim == 3)


def test_what_is_refused():
    layer = make_layer("gated-shared")
    with pytest.raises(ValueError, match="model must be one with experts.*replace_moe"):
        tmoe.lora.add(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="projections must be some of gate_up_proj, down_proj"):
        tmoe.lora.add(layer, projections=["gate"])
    with pytest.raises(ValueError, match="rank must be at least 1"):
        tmoe.lora.add(layer, rank=0)
    with pytest.raises(ValueError, match="adapters from tmoe.lora.add"):
        tmoe.lora.merge(layer)
    tmoe.lora.add(layer)
    with pytest.raises(ValueError, match="without adapters"):
        tmoe.lora.add(layer)
    with pytest.raises(ValueError, match="merge and remove them first"):
        tmoe.MoE.quantized(layer, "fp8_a16")
    layer.experts.down_proj.requires_grad_(True)
    with pytest.raises(ValueError, match=r"down_proj must be frozen .*requires_grad_\(False\)"):
        layer(torch.randn(3, H))
    tmoe.lora.remove(layer)
    quantized = tmoe.MoE.quantized(layer, "fp8_a16")
    tmoe.lora.add(quantized)
    with pytest.raises(ValueError, match="aren't quantised"):
        tmoe.lora.merge(quantized)


@pytest.mark.parametrize("name", [*SIX, *OTHERS])
def test_models_and_files(name, tmp_path):
    """The same as PEFT's: saved by us, read by PEFT on the unreplaced model, and the way back."""
    torch.manual_seed(0)
    model = BY_NAME[name].build()
    plain = copy.deepcopy(model)
    tmoe.replace_moe(model)
    model.requires_grad_(False)
    with torch.no_grad():
        before = outputs(model)
        names = tmoe.lora.add(model, rank=4, alpha=8)
        assert torch.equal(outputs(model), before) and len(names) == BY_NAME[name].layers
    got = gradients(shaken(model))
    assert len(got) == 4 * len(names) and all(g.any() for g in got.values())
    with torch.no_grad():
        y = outputs(model)
        tmoe.lora.save(model, tmp_path / "ours")
        tmoe.lora.merge(model)
        merged = outputs(model)
        assert (merged - before).norm() > 0.01 * before.norm()
        torch.testing.assert_close(y, merged, rtol=1e-3, atol=1e-3)
        tmoe.lora.unmerge(model)
        tmoe.lora.remove(model)
        torch.testing.assert_close(outputs(model), before, rtol=1e-3, atol=1e-3)
        assert tmoe.lora.load(model, tmp_path / "ours") == names
        torch.testing.assert_close(outputs(model), y, rtol=1e-3, atol=1e-3)
        peft = pytest.importorskip("peft")
        if name == "longcat_flash":
            return  # its zero experts have rows that PEFT adapts too
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "ours")
        torch.testing.assert_close(outputs(theirs), y, rtol=1e-3, atol=1e-3)
        theirs.save_pretrained(tmp_path / "theirs")
        tmoe.lora.remove(model)
        tmoe.lora.load(model, tmp_path / "theirs")
        torch.testing.assert_close(outputs(model), y, rtol=1e-3, atol=1e-3)
