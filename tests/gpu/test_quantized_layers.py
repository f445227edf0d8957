"""Layers with quantised weights at the sizes of real models, and the memory that a call takes."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.reference import quantized, some_quantized_tokens_ref
from tmoe.formats import SCHEMES
from tmoe.shapes import MODEL_SHAPES, random_inputs, random_weights

pytestmark = pytest.mark.gpu
SHAPES = {shape.name: shape for shape in MODEL_SHAPES}
CHECKED = 3  # tokens


def layer(shape, scheme, recipe):
    weights = random_weights(shape, torch.device("cuda"), torch.bfloat16)
    scales = {}
    if SCHEMES[scheme].takes_scales:
        scales = dict.fromkeys(("input_scale", "hidden_scale"), torch.tensor(0.01, device="cuda"))
    return [quantized(w, recipe) for w in weights], scales


@pytest.mark.parametrize("tokens", [1, 20, 300, 2000])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-120b"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_real_shapes(scheme, name, tokens):
    """Every row of the tile tables. The tokens checked are recomputed in fp64."""
    shape = SHAPES[name]
    weights, scales = layer(shape, scheme, SCHEMES[scheme].weights[-1])
    x, topk_weights, ids = random_inputs(shape, tokens, torch.device("cuda"), torch.bfloat16)
    y = tmoe.fused_experts(x, *weights, topk_weights, ids, scheme=scheme, **scales)
    assert y.isfinite().all()
    some = torch.linspace(0, tokens - 1, min(tokens, CHECKED), device="cuda").long()
    layer_inputs = (x, *weights, topk_weights, ids)
    assert_matches(y[some], *some_quantized_tokens_ref(some, *layer_inputs, scheme, **scales))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_of_a_call(scheme):
    """No copy of the weights, ever; rows, their codes and scales, and index arrays."""
    shape, T = SHAPES["qwen3-30b-a3b"], 64
    weights, scales = layer(shape, scheme, SCHEMES[scheme].weights[0])
    x, topk_weights, ids = random_inputs(shape, T, torch.device("cuda"), torch.bfloat16)
    tmoe.fused_experts(x, *weights, topk_weights, ids, scheme=scheme, **scales)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    tmoe.fused_experts(x, *weights, topk_weights, ids, scheme=scheme, **scales)
    took = torch.cuda.max_memory_allocated() - before
    S, H, I = T * shape.top_k, shape.hidden, shape.intermediate
    assert took <= 2 * (2 * S * I + S * H + 3 * T * H) + 2**20 < weights[1][0].nbytes * 8


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_block", "nvfp4", "mxfp4_a16"])
def test_cuda_graph(scheme):
    """Other tokens and other routes in the memory that was captured."""
    shape = SHAPES["qwen3-30b-a3b"]
    weights, scales = layer(shape, scheme, SCHEMES[scheme].weights[0])
    first, second = (
        random_inputs(shape, 16, torch.device("cuda"), torch.bfloat16) for _ in range(2)
    )

    def run(x, topk_weights, ids):
        return tmoe.fused_experts(x, *weights, topk_weights, ids, scheme=scheme, **scales)

    held = [t.clone() for t in first]
    run(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(*held)
    for tensor, new in zip(held, second, strict=True):
        tensor.copy_(new)
    graph.replay()
    assert torch.equal(y, run(*second))
