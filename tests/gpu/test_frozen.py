"""Adapters on frozen experts, and gradients through codes, at the sizes of real models."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.gpu.layers import GPT_OSS, LLAMA4, QWEN3, Model, inputs
from tests.gpu.waiting import no_waiting
from tests.reference import quantized
from tmoe.formats import SCHEMES

pytestmark = pytest.mark.gpu
BF16, RANK = torch.bfloat16, 16
CASES = {
    "qwen3": (QWEN3, None, 512),
    "qwen3, few tokens": (QWEN3, None, 16),
    "qwen3, many tokens": (QWEN3, None, 4096),
    "gpt-oss": (GPT_OSS, None, 512),
    "llama4": (LLAMA4, None, 256),
    "qwen3 in fp8": (QWEN3, "fp8_a16", 512),
    "qwen3 in mxfp4": (QWEN3, "mxfp4_a16", 4096),
    "qwen3 in nvfp4": (QWEN3, "nvfp4_a16", 16),
}


def make(model: Model, scheme: str | None, T: int, device: torch.device):
    """Leaves by name, the frozen weights, topk_ids and the gradient of the output."""
    leaves = inputs(model, T, device, BF16)
    ids = leaves.pop("topk_ids")
    ids[::5, 0] = -1
    weights = model.weights(device, BF16)
    for name in ("gate_up", "down"):
        bias = weights.pop(f"{name}_bias", None)
        if bias is not None:
            leaves[f"{name}_bias"] = bias
        weight = weights[f"{name}_proj"]
        E, N, D = weight.shape
        leaves[f"{name}_a"] = torch.randn(E, RANK, D, device=device) / D**0.5
        leaves[f"{name}_b"] = torch.randn(E, N, RANK, device=device) / RANK**0.5
        if scheme is not None:
            weights[f"{name}_proj"] = quantized(weight.contiguous(), SCHEMES[scheme].weights[-1])
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    return leaves, weights, ids, torch.randn_like(leaves["x"])


def step(model, leaves, weights, ids, dy, *, backend="triton", dtype=BF16, scheme=None):
    """The result and all gradients; in another dtype than bf16, of everything in that dtype."""
    if dtype != BF16:
        leaves = {n: leaf.detach().to(dtype).requires_grad_() for n, leaf in leaves.items()}
        weights = {n: weight.to(dtype) for n, weight in weights.items()}
    given = {n: leaf for n, leaf in leaves.items() if n[-2:] not in ("_a", "_b")}
    loras = {
        f"{n}_lora": tmoe.LowRank(leaves[f"{n}_a"], leaves[f"{n}_b"], 0.5)
        for n in ("gate_up", "down")
    }
    with tmoe.options(backend=backend):
        y = tmoe.fused_experts(
            **given, **weights, **loras, topk_ids=ids, scheme=scheme, **model.keywords
        )
    found = torch.autograd.grad(y, list(leaves.values()), dy.to(dtype))
    return {"y": y.detach()} | dict(zip(leaves, found, strict=True))


def check(model: Model, scheme: str | None, T: int, device: torch.device) -> None:
    leaves, weights, ids, dy = make(model, scheme, T, device)
    arguments = (model, leaves, weights, ids, dy)
    got, again = step(*arguments, scheme=scheme), step(*arguments, scheme=scheme)
    numbers = weights
    if scheme is not None:
        numbers = {name: weight.dequantize() for name, weight in weights.items()}
    truth = step(model, leaves, numbers, ids, dy, backend="torch", dtype=torch.float64)
    rounded = {name: number.to(BF16) for name, number in numbers.items()}
    naive = step(model, leaves, rounded, ids, dy, backend="torch")
    for name, gradient in got.items():
        assert torch.equal(gradient, again[name]), f"{name}: not repeated"
        try:
            assert_matches(gradient.double(), truth[name], naive[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("case", CASES)
def test_gradients(case, device):
    """Each within twice torch's own error, and bit by bit the same the second time."""
    model, scheme, T = CASES[case]
    check(model, scheme, T, device)


@pytest.mark.parametrize("scheme", ["fp8_block", "mxfp4_a16", "nvfp4"])
def test_a_grouped_gemm(scheme, device):
    """By itself, with rows of no expert behind the last one, which hold NaN."""
    S, N, D = 3000, 1024, 512
    ends = (0, 100, 100, 900, 901, 1500, 2000, 2600, 2900)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    a = torch.randn(S, D, device=device, dtype=BF16)
    b = torch.randn(len(ends) - 1, N, D, device=device).div(D**0.5)
    b = quantized(b, SCHEMES[scheme].weights[-1])
    dy = torch.randn(S, N, device=device, dtype=BF16)

    def gradient(b, dtype, **how):
        leaf = a.detach().to(dtype).requires_grad_()
        return torch.autograd.grad(tmoe.grouped_gemm(leaf, b, offsets, **how), leaf, dy.to(dtype))

    with tmoe.options(backend="torch"):
        (truth,) = gradient(b.dequantize(torch.float64), torch.float64)
        (naive,) = gradient(b.dequantize(BF16), BF16)
    a[ends[-1] :] = dy[ends[-1] :] = float("nan")
    with tmoe.options(backend="triton"):
        gradient(b, BF16, scheme=scheme)
        with no_waiting():
            (got,) = gradient(b, BF16, scheme=scheme)
    assert_matches(got.double(), truth, naive)


@pytest.mark.parametrize("scheme", [None, "nvfp4"])
def test_a_step_never_waits(scheme, device):
    leaves, weights, ids, dy = make(QWEN3, scheme, 64, device)
    step(QWEN3, leaves, weights, ids, dy, scheme=scheme)
    with no_waiting():
        step(QWEN3, leaves, weights, ids, dy, scheme=scheme)


@pytest.mark.parametrize("scheme", [None, "mxfp4_a16"])
def test_memory(scheme, device):
    """Beside the rows, what is as large as the factors only: their gradients in fp32, and copies
    of both in bf16."""
    T = 512
    arguments = (QWEN3, *make(QWEN3, scheme, T, device))
    step(*arguments, scheme=scheme)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(*arguments, scheme=scheme)
    took = torch.cuda.max_memory_allocated() - before
    S, H, I = T * QWEN3.shape.top_k, QWEN3.shape.hidden, QWEN3.shape.intermediate
    of_factors = sum(
        leaf.nbytes for name, leaf in arguments[1].items() if name[-2:] in ("_a", "_b")
    )
    rows = 2 * (S * (5 * I + H + 4 * RANK) + 4 * T * H)
    assert took <= rows + 2.5 * of_factors + 2**22 < 2 * QWEN3.shape.num_experts * H * I
