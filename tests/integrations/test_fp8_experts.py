"""transformers' fine-grained FP8 experts on tmoe. On a CPU transformers dequantises such a
checkpoint at load, so the modules are built here; their own forward needs a GPU's kernels. Truth:
the weights as transformers dequantises them, with inputs rounded as the scheme says."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.finegrained_fp8 import (
    ALL_FP8_EXPERTS_FUNCTIONS,
    Fp8Dequantize,
    FP8Experts,
)
from transformers.integrations.moe import use_experts_implementation

import tmoe
from tests.checking import assert_matches
from tests.checkpoints.kinds import spread
from tests.integrations.counting import CountOps
from tests.integrations.families import BY_NAME
from tests.integrations.family import DEVICE
from tests.reference import activation_ref, fused_experts_ref, quantized_experts_ref
from tmoe.integrations.transformers import register

E, H, I, T, K = 8, 64, 128, 9, 2
EXPERTS = use_experts_implementation(
    type("FP8Experts", (FP8Experts,), {"__qualname__": "FP8Experts"}),
    experts_interface=ALL_FP8_EXPERTS_FUNCTIONS,
)


def build(block=(128, 128), *, scale_fmt="float", activations="dynamic", **config):
    """The module as transformers' quantiser makes it, filled."""
    register()
    made = BY_NAME["mixtral"].build().config
    made.update({"intermediate_size": I, **config})
    made._experts_implementation_internal = "tmoe"
    experts = EXPERTS(made, block, activation_scheme=activations, scale_fmt=scale_fmt).to(DEVICE)
    for name, parameter in experts.named_parameters():
        if parameter.dtype == torch.float8_e8m0fnu:
            bytes = torch.randint(118, 124, parameter.shape, dtype=torch.uint8)
            parameter.data = bytes.view(torch.float8_e8m0fnu).to(DEVICE)
        elif parameter.dtype == torch.int8:
            parameter.data = torch.randint(-128, 128, parameter.shape, dtype=torch.int8).to(DEVICE)
        elif "activation_scale" in name:
            parameter.data = torch.linspace(0.01, 0.03, E).to(DEVICE)
        elif "scale" in name:
            parameter.data = (torch.rand(parameter.shape) * 0.2 + 0.02).to(DEVICE)
        else:
            parameter.data = torch.randn(parameter.shape).to(DEVICE).to(torch.float8_e4m3fn)
    return experts


def dequantized(experts, name):
    """(E, N, K) fp32: transformers' own for whole blocks, and its formula where it isn't right."""
    weight, scale = getattr(experts, name).detach().cpu(), getattr(experts, f"{name}_scale_inv")
    scale = scale.detach().cpu()
    if experts.block_size is None:
        return weight.float() * scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    if experts.block_size == (128, 128):  # Fp8Dequantize takes other blocks than the config's
        _, N, K = weight.shape
        return weight.float() * spread(scale.float(), 128, 128)[:, :N, :K]
    return torch.stack(
        [Fp8Dequantize(None)._dequantize_one(w, s, torch.float32)
         for w, s in zip(weight, scale, strict=True)]
    )  # fmt: skip


def inputs():
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    return torch.randn(T, H).to(DEVICE), ids.to(DEVICE), torch.rand(T, K).to(DEVICE)


CASES = {
    "fp8_block": dict(),
    "fp8_block, e8m0": dict(scale_fmt="ue8m0"),
    "mxfp8": dict(block=(1, 32), scale_fmt="ue8m0"),
    "fp8_channel": dict(block=None),
    "fp8_tensor": dict(block=None, activations="static"),
}


@pytest.mark.parametrize("case", CASES)
def test_against_dequantised_weights(case):
    experts, (x, ids, weights) = build(**CASES[case]), inputs()
    scales = {}
    if case == "fp8_tensor":
        experts.gate_up_proj_activation_scale.data.fill_(0.01)  # one number, for the reference
        experts.down_proj_activation_scale.data.fill_(0.03)
        scales = {"input_scale": torch.tensor(0.01), "hidden_scale": torch.tensor(0.03)}
    with torch.no_grad(), CountOps() as ops:
        y = experts(x, ids, weights)
    assert dict(ops.calls) == {"quantized_experts": 1}
    layer = (x.cpu(), dequantized(experts, "gate_up_proj"), dequantized(experts, "down_proj"))
    layer = (*layer, weights.cpu(), ids.cpu())
    truth = quantized_experts_ref(*layer, case.split(",")[0], **scales)
    assert_matches(y.cpu(), truth, fused_experts_ref(*layer, dtype=torch.bfloat16))


@pytest.mark.skipif(
    "expert_dtype" not in FP8Experts.__init__.__code__.co_varnames, reason="by config there"
)
def test_fp4_experts():
    """DeepSeek-V4's: packed int8, e8m0 scales of 32."""
    register()
    config = BY_NAME["mixtral"].build().config
    config.update({"intermediate_size": I, "_experts_implementation_internal": "tmoe"})
    made = EXPERTS(config, (128, 128), scale_fmt="ue8m0", expert_dtype="fp4").to(DEVICE)
    for parameter in made.parameters():
        if parameter.dtype == torch.int8:
            parameter.data = torch.randint(-128, 128, parameter.shape, dtype=torch.int8).to(DEVICE)
        else:
            size = torch.randint(118, 124, parameter.shape, dtype=torch.uint8)
            parameter.data = size.view(torch.float8_e8m0fnu).to(DEVICE)
    x, ids, weights = inputs()
    made.block_size = (1, 32)  # what `dequantized` above reads; the module ignores it
    layer = [dequantized(made, name) for name in ("gate_up_proj", "down_proj")]
    layer = (x.cpu(), *layer, weights.cpu(), ids.cpu())
    with torch.no_grad():
        y = made(x, ids, weights)
    truth = quantized_experts_ref(*layer, "mxfp4_a8")
    assert_matches(y.cpu(), truth, fused_experts_ref(*layer, dtype=torch.bfloat16))


def test_no_weight_is_copied():
    """The kernels read the parameters' own memory, and each later change shows."""
    from tmoe.integrations.transformers.fp8_experts import _weight

    experts, (x, ids, weights) = build(), inputs()
    q = _weight(experts, "down_proj")
    assert q.data.data_ptr() == experts.down_proj.data_ptr()
    assert q.scale.data_ptr() == experts.down_proj_scale_inv.data_ptr()
    with torch.no_grad():
        before = experts(x, ids, weights)
        experts.down_proj_scale_inv.mul_(2)
        assert torch.equal(experts(x, ids, weights), before * 2)


@pytest.mark.parametrize("config", [
    dict(swiglu_limit=0.5), dict(swiglu_alpha=1.702, swiglu_limit=0.5), dict(hidden_act="gelu"),
], ids=str)  # fmt: skip
def test_gates_by_config(config):
    """WL05: the clamps that the config asks for. Truth: the module's own `_apply_gate`."""
    from tmoe.integrations.transformers.fp8_experts import _activation

    experts = build(**config)
    activation = _activation(experts)
    gate_up = torch.randn(64, 2 * I) * 2
    name, alpha, limit = activation.name, activation.alpha, activation.limit
    got = activation_ref(*gate_up.double().chunk(2, -1), name, alpha, limit)
    torch.testing.assert_close(got.float(), experts._apply_gate(gate_up), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make, reason", [
    (lambda: build(block=(16, 16)), r"its block_size is \(16, 16\) .*; tmoe has blocks of 128"),
    (lambda: build(activations="static"), "static scales of the inputs go with one scale per"),
    (lambda: build(swiglu_alpha=1.7), "the activation of SiLUActivation, swiglu_alpha=1.7"),
    (lambda: reshaped(build()), r"down_proj_scale_inv is \(8, 2, 1\), not \(8, 1, 1\) for"),
], ids=["blocks", "static", "gate", "shape"])  # fmt: skip
def test_refused_with_the_numbers(make, reason):
    experts, (x, ids, weights) = make(), inputs()
    with pytest.raises(NotImplementedError, match=rf"FP8Experts\(8 experts\): .*{reason}"):
        experts(x, ids, weights)


def reshaped(experts):
    experts.down_proj_scale_inv.data = torch.ones(E, 2, 1)
    return experts


def test_replace_moe_and_restore():
    """`replace_moe` switches them through their config, and `restore` switches back."""
    model = BY_NAME["mixtral"].build()
    for layer in model.model.layers:
        layer.mlp.experts = build()
        layer.mlp.experts.config = model.config
    model.config._experts_implementation_internal = "grouped_mm"
    report = tmoe.replace_moe(model)
    assert report.replaced == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    with torch.no_grad(), CountOps() as ops:
        model(torch.tensor([[3, 4, 5]], device=DEVICE))
    assert dict(ops.calls) == {"router": 2, "quantized_experts": 2}
    report.restore()
    assert model.config._experts_implementation == "grouped_mm"


def test_compiles_whole():
    """No graph break: what the module is, is read off its class and its shapes."""
    experts, arguments = build(), inputs()
    with torch.no_grad(), tmoe.options(backend="torch"):
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*arguments), experts(*arguments))
