"""Training: every parameter gets its gradient, whatever stands around the layer."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.checking import assert_matches
from tests.nn.layers import CASES, H, make_layer
from tests.nn.plain import plain_moe

# A gradient went through ten roundings or so, and two ways of doing the same spread more than one
# operation does.
SPREAD = 4.0


def gradients(layer, run, x):
    """Gradients of a fixed projection of run(x) with respect to the parameters and x."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    # Eighths, exact in every dtype, so that all runs differentiate the same function.
    direction = (torch.arange(y.numel(), device=y.device) * 7 % 17 - 8).view(y.shape) / 8
    (y * direction.to(y.dtype)).sum().backward()
    return {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad}


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_a_loop(case, device):  # GR01
    layer = make_layer(case).to(device)
    x = torch.randn(24, H, device=device)  # enough tokens for every expert to get some
    got = gradients(layer, layer, x)
    naive = gradients(layer, lambda x: plain_moe(layer, x, torch.float32), x)
    truth = gradients(layer, lambda x: plain_moe(layer, x, torch.float64), x)
    for name, gradient in got.items():
        assert gradient is not None, f"{name} has no gradient"
        assert gradient.abs().max() > 0, f"the gradient of {name} is zero"
        assert_matches(gradient, truth[name], naive[name], factor=SPREAD)


def test_frozen_experts_get_none_and_the_rest_do():
    layer = make_layer("gated-shared")
    layer.experts.requires_grad_(False)
    got = gradients(layer, layer, torch.randn(8, H))
    assert {name for name, g in got.items() if g is None} == {
        "experts.gate_up_proj", "experts.down_proj",
    }  # fmt: skip


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=["fp32-x", "bf16-x"])
@pytest.mark.parametrize("case", ["gated-shared", "gpt-oss", "deepseek"])
def test_under_autocast(case, x_dtype, device):  # GR05
    layer = make_layer(case).to(device)
    x = torch.randn(24, H, device=device, dtype=x_dtype)

    def run(x):
        with torch.autocast(device.type, torch.bfloat16):
            y = layer(x)
        assert y.dtype == x_dtype
        return y

    got = gradients(layer, run, x)
    naive = gradients(layer, lambda x: plain_moe(layer, x, torch.bfloat16), x)
    truth = gradients(layer, lambda x: plain_moe(layer, x, torch.float64), x)
    for name, gradient in got.items():
        assert gradient.dtype == (x if name == "x" else layer.get_parameter(name)).dtype, name
        assert_matches(gradient, truth[name], naive[name], factor=SPREAD)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant, device):  # CG12
    layer = make_layer("deepseek").to(device)
    x = torch.randn(24, H, device=device)
    plain = gradients(layer, layer, x)
    saved = gradients(layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant), x)
    for name, gradient in plain.items():
        assert torch.equal(saved[name], gradient), name


def test_zero_tokens_give_zero_gradients(device):
    layer = make_layer("gated-shared").to(device)
    layer(torch.zeros(0, H, device=device, requires_grad=True)).sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is None or not p.grad.any(), name


def test_learns_to_copy_a_teacher(device):
    """A few steps of Adam bring the loss well down: the gradients point the right way."""
    teacher, student = (make_layer("shared").to(device) for _ in range(2))
    x = torch.randn(64, H, device=device)
    with torch.no_grad():
        target = teacher(x)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (student(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
