"""The hot path: captured after one warm-up call, never waiting for the device, nothing allocated
but what the documentation says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tmoe
from tests.gpu.layers import GPT_OSS, MODELS, QWEN3, check_tokens, inputs, run, zipf
from tests.gpu.waiting import no_waiting

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
E, K = QWEN3.shape.num_experts, QWEN3.shape.top_k
RENORMALIZE = tmoe.Routing(E, K, "Renormalize")
TOKENS = ("x", "topk_weights", "topk_ids")


def call(tensors: dict[str, Tensor], keywords: dict) -> Tensor:
    with tmoe.options(backend="triton"):
        return tmoe.fused_experts(**tensors, **keywords)


def capture(tensors: dict[str, Tensor], keywords: dict) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """One warm-up call, then the graph and the tensor it writes."""
    call(tensors, keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(tensors, keywords)
    return graph, y


@pytest.mark.parametrize("model", [QWEN3, GPT_OSS], ids=["qwen3", "gpt-oss"])
@pytest.mark.parametrize("T", [1, 33, 1000])
def test_a_replay_follows_its_inputs(model, T, device):
    """OV09, too: captured with one routing, replayed with the most uneven ones."""
    weights = model.weights(device, BF16)
    static = inputs(model, T, device, BF16) | weights
    graph, y = capture(static, model.keywords)
    for routing in ("random", "one-expert", "zipf"):
        fresh = inputs(model, T, device, BF16, routing)
        for name in TOKENS:
            static[name].copy_(fresh[name])
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, call(fresh | weights, model.keywords))


def test_a_replay_with_padded_rows(device):
    """PD05: captured for 8 tokens, replayed with 5; the other rows hold ids -1 and NaN."""
    weights = QWEN3.weights(device, BF16)
    static = inputs(QWEN3, 8, device, BF16) | weights
    graph, y = capture(static, QWEN3.keywords)
    fresh = inputs(QWEN3, 8, device, BF16)
    for name in TOKENS:
        static[name].copy_(fresh[name])
    static["x"][5:] = static["topk_weights"][5:] = float("nan")
    static["topk_ids"][5:] = -1
    graph.replay()
    assert (y[5:] == 0).all()
    check_tokens(y, list(range(5)), fresh | weights, QWEN3.keywords)
    assert torch.equal(y, call(static, QWEN3.keywords))


def test_routing_is_captured_as_well(device):
    weights = QWEN3.weights(device, BF16)
    x, logits = inputs(QWEN3, 16, device, BF16)["x"], torch.randn(16, E, device=device)

    def layer(logits: Tensor) -> Tensor:
        with tmoe.options(backend="triton"):
            return tmoe.moe(x, logits, **weights, routing=RENORMALIZE)

    layer(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(logits)
    for _ in range(2):
        fresh = torch.randn(16, E, device=device) + zipf(E).log().to(device)
        logits.copy_(fresh)
        graph.replay()
        assert torch.equal(y, layer(fresh))


@pytest.mark.parametrize("T", [1, 128, 4096])
def test_no_call_waits_for_the_device(T, device):
    """CG02"""
    weights = QWEN3.weights(device, BF16)
    x, logits = inputs(QWEN3, T, device, BF16)["x"], torch.randn(T, E, device=device)
    offsets = torch.arange(E + 1, dtype=torch.int32, device=device) * (T * K // E)
    a = x.repeat(K, 1)

    def everything():
        with tmoe.options(backend="triton"):
            tmoe.moe(x, logits, **weights, routing=RENORMALIZE)
            tmoe.grouped_gemm(a, weights["gate_up_proj"], offsets)

    everything()  # compiles
    with no_waiting():
        everything()


def test_training_does_not_wait_either(device):
    """In bf16, where torch has a grouped GEMM."""
    weights = QWEN3.weights(device, BF16)
    leaves = [value.requires_grad_() for value in weights.values()]
    x, logits = inputs(QWEN3, 64, device, BF16)["x"], torch.randn(64, E, device=device)
    logits.requires_grad_()
    grad = torch.randn_like(x)

    def step():
        y = tmoe.moe(x, logits, **weights, routing=RENORMALIZE)
        return torch.autograd.grad(y, [logits, *leaves], grad)

    step()
    with no_waiting():
        step()


@pytest.mark.parametrize("routing", ["random", "one-expert"])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b"])
@pytest.mark.parametrize("T", [1, 4096])
def test_memory_is_what_the_formula_says(name, T, routing, device):
    """OV08: the output, the (S, I) and the (S, H) rows, whatever the routing."""
    model = MODELS[name]
    tensors = inputs(model, T, device, BF16, routing) | model.weights(device, BF16)
    call(tensors, model.keywords)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = call(tensors, model.keywords)
    used = torch.cuda.max_memory_allocated() - before
    S = T * model.shape.top_k
    rows = S * (model.shape.intermediate + model.shape.hidden) * BF16.itemsize
    assert used <= y.nbytes + rows + 64 * 2**20
    del y
    assert torch.cuda.memory_allocated() == before, "a call keeps memory"


def test_a_warm_up_with_even_routing_serves_every_other(device):
    """CG03, OV09"""
    weights = QWEN3.weights(device, BF16)
    call(inputs(QWEN3, 1000, device, BF16) | weights, QWEN3.keywords)
    tensors = inputs(QWEN3, 1000, device, BF16, "one-expert") | weights
    check_tokens(run(tensors, QWEN3.keywords), [0, 500, 999], tensors, QWEN3.keywords)
