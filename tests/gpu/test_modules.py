"""`tmoe.MoE` on a GPU: compiled, under autocast, and in training."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.gpu.layers import reference

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
H, I, E, K = 256, 128, 16, 4


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_layer(device, dtype=BF16) -> tmoe.MoE:
    """With an fp32 router, so that rounding sends no token to another expert."""
    routing = tmoe.Routing(E, K, "Renormalize")
    layer = tmoe.MoE(H, I, routing, shared_intermediate_size=I).to(device, dtype)
    layer.gate.float()
    return layer


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled(mode, device):
    """CG11: no graph break; with CUDA graphs, replays follow their input."""
    layer = make_layer(device).eval()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.no_grad():
        for T in (33, 33, 33, 33, 1, 1, 1):
            x = torch.randn(T, H, device=device).to(BF16)
            got = compiled(x).clone()
            torch.testing.assert_close(got, layer(x), rtol=2e-2, atol=2e-2)


def test_compiled_training(device):
    """Gradients of the compiled layer are those of the eager one."""
    layer = make_layer(device, torch.float32)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(33, H, device=device)
    found = []
    for run in (layer, compiled):
        layer.zero_grad()
        run(x).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in layer.parameters()])
    for eager, got in zip(*found, strict=True):
        torch.testing.assert_close(got, eager, rtol=1e-3, atol=1e-4)


def test_autocast(device):
    """fp32 parameters, bf16 matmuls: the same as with parameters cast by hand."""
    layer = make_layer(device, torch.float32).experts.eval()
    x = torch.randn(65, H, device=device)
    weights, ids = torch.randn(65, E, device=device).softmax(-1).topk(K)
    with torch.no_grad():
        with torch.autocast(device.type, BF16):
            got = layer(x, ids, weights)
        want = tmoe.fused_experts(
            x.to(BF16), layer.gate_up_proj.to(BF16), layer.down_proj.to(BF16), weights, ids
        )
    assert got.dtype == BF16 and torch.equal(got, want)


def test_a_whole_layer_under_autocast(device):
    layer = make_layer(device, torch.float32).eval()
    x = torch.randn(65, H, device=device)
    with torch.no_grad():
        want = layer(x)
        with torch.autocast(device.type, BF16):
            got = layer(x)
    assert got.dtype == x.dtype and got.isfinite().all()
    # A token whose experts change because its logits are rounded is another token.
    same = (got - want).abs().amax(1) < 5e-2
    assert same.float().mean() > 0.9


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_gradients(bias, dtype, device):
    """Of the torch backend (bf16: torch's grouped GEMM) against fp64, expert by expert."""
    leaves = {
        "x": torch.randn(24, H),
        "gate_up_proj": torch.randn(E, 2 * I, H) / 16,
        "down_proj": torch.randn(E, H, I) / 11,
    }
    if bias:
        leaves |= {"gate_up_bias": torch.randn(E, 2 * I), "down_bias": torch.randn(E, H)}
    leaves = {name: value.to(device, dtype) for name, value in leaves.items()}
    leaves["topk_weights"], ids = torch.randn(24, E, device=device).softmax(-1).topk(K)
    ids[3] = -1  # one token is dropped
    ids[ids == 5] = 6  # one expert gets nothing
    grad = torch.randn(24, H).to(device, dtype)

    def gradients(function, dtype=None):
        known = {n: v.detach().to(dtype or v.dtype).requires_grad_() for n, v in leaves.items()}
        y = function(known | {"topk_ids": ids})
        return torch.autograd.grad(y, list(known.values()), grad.to(y.dtype))

    got = gradients(lambda tensors: tmoe.fused_experts(**tensors))
    truth = gradients(lambda tensors: reference(tensors, {}), torch.float64)
    naive = gradients(lambda tensors: reference(tensors, {}, dtype), dtype)
    for name, mine, exact, plain in zip(leaves, got, truth, naive, strict=True):
        assert mine.dtype == leaves[name].dtype
        assert_matches(mine, exact, plain.to(mine.dtype))
    assert (got[1][5] == 0).all() and (got[2][5] == 0).all()  # PD08
    assert (got[0][3] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_training_learns(dtype, device):
    """Every parameter gets a gradient, and the loss falls."""
    layer = make_layer(device, dtype)
    x = torch.randn(64, H, device=device).to(dtype)
    target = torch.randn(64, H, device=device).to(dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=2e-3)
    losses = []
    for _ in range(20):
        loss = (layer(x) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
