"""The layers of real models, from one token to 4096."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.gpu.layers import GPT_OSS, MODELS, QWEN3, check_tokens, inputs, reference, run, sample

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(scope="module", params=MODELS)
def layer(request):
    """A model and its weights in bf16, made once for all tests that ask for them."""
    model = MODELS[request.param]
    needed = 6 * model.shape.num_experts * model.shape.hidden * model.shape.intermediate
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 1.2 * needed + 2**33:
        pytest.skip(f"needs {needed / 1e9:.0f} GB for the weights alone")
    return model, model.weights(torch.device("cuda"), BF16)


def check(model, weights, T, routing, device, dtype=BF16):
    tensors = inputs(model, T, device, dtype, routing) | weights
    got = run(tensors, model.keywords)
    assert got.isfinite().all(), "some rows were never written"
    check_tokens(got, sample(T), tensors, model.keywords)


@pytest.mark.parametrize("T", [1, 16, 33, 128, 1000, 4096])
def test_random_routing(layer, T, device):
    check(*layer, T, "random", device)


@pytest.mark.parametrize("T", [33, 4096])
@pytest.mark.parametrize("routing", ["one-expert", "zipf"])
def test_skewed_routing(layer, routing, T, device):
    """EP14: one expert gets every token; a few get most."""
    check(*layer, T, routing, device)


@pytest.mark.parametrize("model", [QWEN3, GPT_OSS], ids=["qwen3", "gpt-oss"])
@pytest.mark.parametrize("T", [1, 128, 4096])
def test_fp16(model, T, device):
    check(model, model.weights(device, FP16), T, "random", device, FP16)


@pytest.mark.parametrize("T", [1, 33, 1000])
def test_fp32(T, device):
    model = MODELS["olmoe"]
    check(model, model.weights(device, torch.float32), T, "random", device, torch.float32)


@pytest.mark.parametrize("T", [5, 1000])
def test_the_torch_backend_is_right_too(T, device):
    """It is the yardstick above, and what trains."""
    for model in (QWEN3, GPT_OSS):
        tensors = inputs(model, T, device, BF16) | model.weights(device, BF16)
        got, tokens = run(tensors, model.keywords, backend="torch"), sample(T)
        known = tensors | {n: tensors[n][tokens] for n in ("x", "topk_weights", "topk_ids")}
        naive = reference(known, model.keywords, BF16)
        assert_matches(got[tokens], reference(known, model.keywords), naive)


@pytest.mark.parametrize("T", [16, 1000])
def test_windows_of_experts_add_up(T, device):
    """EP01, EP06, EP09: each rank has a quarter of the experts; the sum is the layer."""
    weights, E = QWEN3.weights(device, BF16), QWEN3.shape.num_experts
    tokens = inputs(QWEN3, T, device, BF16)
    total = torch.zeros_like(tokens["x"], dtype=torch.float32)
    for first in range(0, E, E // 4):
        own = slice(first, first + E // 4)
        local = {name: value[own] for name, value in weights.items()}
        keywords = QWEN3.keywords | {"first_expert": first, "num_experts": E}
        part = run(tokens | local, keywords)
        here = (tokens["topk_ids"] >= own.start) & (tokens["topk_ids"] < own.stop)
        assert (part[~here.any(1)] == 0).all()
        check_tokens(part, sample(T), tokens | local, keywords)
        total += part.float()
    whole = run(tokens | weights, QWEN3.keywords)
    torch.testing.assert_close(total, whole.float(), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("method", ["Renormalize", "DeepSeekV3"])
@pytest.mark.parametrize("T", [1, 1000])
def test_from_the_logits(method, T, device):
    shape = QWEN3.shape
    weights, tokens = QWEN3.weights(device, BF16), inputs(QWEN3, T, device, BF16)
    grouped = {"n_group": 8, "topk_group": 4, "scaling_factor": 2.5}
    routing = tmoe.Routing(
        shape.num_experts, shape.top_k, method, **(grouped if method == "DeepSeekV3" else {})
    )
    logits = torch.randn(T, shape.num_experts, device=device)
    with tmoe.options(backend="triton"):
        y = tmoe.moe(tokens["x"], logits, **weights, routing=routing)
    with tmoe.options(backend="torch"):
        topk_weights, topk_ids = tmoe.route(logits, routing)
    routed = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    check_tokens(y, sample(T), tokens | routed | weights, {})
