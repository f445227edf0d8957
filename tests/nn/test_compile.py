"""torch.compile without graph breaks and torch.export, in evaluation and in training."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.nn.layers import H, make_layer

CASES = ["gated-shared", "gpt-oss", "deepseek", "llama4"]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES)
def test_one_graph_serves_every_number_of_tokens(case, device):  # CG11
    layer, counter = make_layer(case).to(device).eval(), CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for T in (7, 64, 2, 33):
            x = torch.randn(T, H, device=device)
            torch.testing.assert_close(compiled(x), layer(x))
    assert counter.frame_count == 1
    with torch.no_grad():  # one token: torch specialises on sizes 0 and 1
        compiled(torch.randn(1, H, device=device))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("case", CASES)
def test_training_compiles(case, device):  # CG11
    layer = make_layer(case).to(device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(16, H, device=device)
    grads = []
    for run in (layer, compiled):
        layer.zero_grad()
        x_run = x.clone().requires_grad_()
        run(x_run).square().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters()] + [x_run.grad])
    for eager, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, eager)


def test_autocast_compiles(device):
    layer = make_layer("gated-shared").to(device).eval()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(16, H, device=device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("case", CASES)
def test_exports_with_a_dynamic_number_of_tokens(case, device):
    layer = make_layer(case).to(device).eval()
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(
        layer, (torch.randn(8, H, device=device),), dynamic_shapes=({0: tokens},)
    )
    x = torch.randn(19, H, device=device)
    torch.testing.assert_close(program.module()(x), layer(x))
