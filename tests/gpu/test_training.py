"""Gradients at the sizes of real models: right, the same in every run, captured, and in how much
memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.gpu.layers import GPT_OSS, LLAMA4, QWEN3, SHAPES, Model, inputs
from tests.gpu.waiting import no_waiting
from tmoe.bench.activation_memory import peak_memory
from tmoe.bench.gradients import experts_gradients_ref
from tmoe.shapes import MoEShape

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
MIXTRAL = Model(SHAPES["mixtral-8x7b"])
# With fewer experts than the models have: the reference holds every gradient in fp64.
FEW_GPT_OSS = replace(GPT_OSS, shape=MoEShape("gpt-oss", 24, 4, 2880, 2880))
FEW_LLAMA4 = replace(LLAMA4, shape=MoEShape("llama4", 3, 1, 5120, 8192))
NEMOTRON = Model(MoEShape("nemotron-3-nano", 64, 6, 2688, 1856), tmoe.Activation.of("relu2"))
FP32 = Model(MoEShape("fp32", 16, 4, 512, 256), bias=True)
ODD = Model(MoEShape("odd", 12, 3, 1001, 333), bias=True)
SMALL = Model(MoEShape("small", 32, 4, 1024, 512))
CASES = {
    "qwen3": (QWEN3, 512, BF16, {}),
    "many rows per expert": (replace(QWEN3, shape=MoEShape("", 16, 8, 2048, 768)), 4096, BF16, {}),
    "skewed, slots dropped": (QWEN3, 1024, BF16, {"routing": "zipf", "drop": True}),
    "one expert": (SMALL, 700, BF16, {"routing": "one-expert"}),
    "recompute": (SMALL, 1024, BF16, {"recompute": True}),
    "mixtral": (MIXTRAL, 1024, BF16, {}),
    "gpt-oss": (FEW_GPT_OSS, 512, BF16, {"drop": True}),
    "llama4": (FEW_LLAMA4, 512, BF16, {}),
    "nemotron": (NEMOTRON, 1024, BF16, {}),
    "geglu": (replace(SMALL, activation=tmoe.Activation.of("geglu")), 1024, BF16, {}),
    "odd sizes": (ODD, 777, BF16, {}),
    "few tokens": (QWEN3, 16, BF16, {}),
    "one token": (SMALL, 1, BF16, {}),
    "fp16": (SMALL, 1024, torch.float16, {}),
    "fp16, recompute": (replace(SMALL, bias=True), 512, torch.float16, {"recompute": True}),
    "fp32": (FP32, 512, torch.float32, {}),
}


def make(model: Model, T: int, device, dtype, *, routing="random", drop=False):
    """Leaves by name, topk_ids and the gradient of the output."""
    made = inputs(model, T, device, dtype, routing)
    ids = made.pop("topk_ids")
    if drop:
        ids[::3, 0] = -1
        ids[1::5, -1] = model.shape.num_experts + 7
    leaves = {n: t.requires_grad_() for n, t in (made | model.weights(device, dtype)).items()}
    return leaves, ids, torch.randn_like(made["x"])


def step(model: Model, leaves, ids, dy, *, recompute=False):
    with tmoe.options(backend="triton", recompute=recompute):
        y = tmoe.fused_experts(**leaves, topk_ids=ids, **model.keywords)
    found = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach()} | dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_gradients(case, device):
    """Each within twice torch's own error, and bit by bit the same the second time."""
    model, T, dtype, how = CASES[case]
    recompute = how.get("recompute", False)
    given = {name: value for name, value in how.items() if name != "recompute"}
    leaves, ids, dy = make(model, T, device, dtype, **given)
    got = step(model, leaves, ids, dy, recompute=recompute)
    again = step(model, leaves, ids, dy, recompute=recompute)
    plain = {name: leaf.detach() for name, leaf in leaves.items()}
    truth, naive = (
        experts_gradients_ref(each, plain, ids, dy, **model.keywords)
        for each in (torch.float64, dtype)
    )
    for name, gradient in got.items():
        assert torch.equal(gradient, again[name]), f"{name}: not repeated"
        try:
            assert_matches(gradient, truth[name], naive[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_grouped_gemm(device):
    """With rows of no expert behind the last one, which hold NaN."""
    S, N, D = 3000, 1024, 512
    ends = (0, 100, 100, 900, 901, 1500, 2000, 2600, 2900)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    a = torch.randn(S, D, device=device, dtype=BF16)
    b = torch.randn(len(ends) - 1, N, D, device=device).div(D**0.5).to(BF16)
    dy = torch.randn(S, N, device=device, dtype=BF16)

    def gradients(backend, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (a, b)]
        with tmoe.options(backend=backend):
            y = tmoe.grouped_gemm(*leaves, offsets)
        return torch.autograd.grad(y, leaves, dy.to(dtype))

    truth, naive = gradients("torch", torch.float64), gradients("torch", BF16)
    a[ends[-1] :] = dy[ends[-1] :] = float("nan")
    for got, *others in zip(gradients("triton", BF16), truth, naive, strict=True):
        assert_matches(got, *others)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_never_waits_and_is_captured(recompute, device):
    """A whole layer: router, experts and all gradients, replayed with other tokens."""
    E, K, H, I = 64, 8, 1024, 512
    layer = tmoe.MoE(H, I, tmoe.Routing(E, K, "Renormalize"), device=device, dtype=BF16)
    static = torch.randn(512, H, device=device, dtype=BF16, requires_grad=True)

    def gradients():
        with tmoe.options(backend="triton", recompute=recompute):
            loss = layer(static).float().square().sum()
        return torch.autograd.grad(loss, [static, *layer.parameters()])

    gradients()
    with no_waiting():
        gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    for scale in (1.0, 3.0):
        with torch.no_grad():
            static.copy_(scale * torch.randn_like(static))
        graph.replay()
        for got, want in zip(captured, gradients(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("how", ["kept", "recompute", "retain_graph"])
@pytest.mark.parametrize("model", [QWEN3, MIXTRAL], ids=["qwen3", "mixtral"])
def test_memory(model, how, device):
    """Per row: h, w·a and one row of x's size; d_h is written over h, unless h is needed again."""
    T, recompute = 4096, how == "recompute"
    leaves, ids, dy = make(model, T, device, BF16)
    step(model, leaves, ids, dy, recompute=recompute)

    def forward():
        with tmoe.options(backend="triton", recompute=recompute):
            return tmoe.fused_experts(**leaves, topk_ids=ids, **model.keywords)

    def backward(y):
        again = how == "retain_graph"
        return torch.autograd.grad(y, list(leaves.values()), dy, retain_graph=again)

    peaks = peak_memory(forward, backward, [name.endswith("_proj") for name in leaves])
    shape, width = model.shape, BF16.itemsize
    S, H, I = T * shape.top_k, shape.hidden, shape.intermediate
    tokens = 2 * width * T * H  # y and x's gradient
    indices = 16 * S + 2**22
    assert peaks.kept <= tokens + (0 if recompute else width * S * 2 * I) + indices
    rows = (4 * I if how == "retain_graph" else 2 * I) + I + H
    assert peaks.activations <= width * S * rows + tokens + indices


def test_gradients_are_added_to_main_grad(device):
    """fp32 buffers, in the order of the plain gradients: less is lost than they lose."""
    model = SMALL
    leaves, ids, dy = make(model, 2048, device, BF16)
    plain = step(model, leaves, ids, dy)
    for name in ("gate_up_proj", "down_proj"):
        leaves[name].main_grad = torch.ones_like(leaves[name], dtype=torch.float32)
    with tmoe.options(backend="triton", main_grad=True):
        tmoe.fused_experts(**leaves, topk_ids=ids, **model.keywords).backward(dy)
    for name in ("gate_up_proj", "down_proj"):
        got, want = leaves[name].main_grad - 1, plain[name].float()
        assert leaves[name].grad is None
        torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-6)
