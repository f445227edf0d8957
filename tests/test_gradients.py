"""Gradients against autograd of the reference, and where they must be exactly zero or refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tmoe
from tests.reference import fused_experts_ref, grouped_gemm_ref
from tmoe import registry
from tmoe.activation import GATED, UNGATED
from tmoe.backends.triton_backend import TritonBackend

NAN = float("nan")
CASES = {
    "plain": {},
    "biases": {"bias": True},
    "interleaved": {"activation": "swiglu_oai", "bias": True, "keywords": {"interleaved": True}},
    "weight-on-input": {"bias": True, "keywords": {"weight_on_input": True}},
    "empty-experts-and-dropped-slots": {"ids": ((0, -1), (2, 0), (-1, 9), (2, 5))},
    "window": {"ids": ((4, 3), (9, 6), (5, 1), (8, 7)), "keywords": {"first_expert": 4}},
    "uneven-weights (SC13)": {"ids": ((0, 1),) * 4, "weights": (0.9, 0.1)},
    "no-token (EM07)": {"T": 0, "bias": True},
    **{f"activation-{name}": {"activation": name} for name in GATED[1:3] + UNGATED},
    "step": {"activation": tmoe.Activation.swiglu_step(0.2)},
    "clamped": {"activation": tmoe.Activation.swiglu(0.5)},
}


def make(*, T=4, H=8, I=6, E=6, K=2, activation="swiglu", bias=False, ids=None, weights=None,
         keywords=None, dtype=torch.float64):  # fmt: skip
    activation = tmoe.Activation.of(activation)
    rows = 2 * I if activation.gated else I
    tensors = {
        "x": torch.randn(T, H, dtype=dtype),
        "gate_up_proj": torch.randn(E, rows, H, dtype=dtype) / 2,
        "down_proj": torch.randn(E, H, I, dtype=dtype) / 2,
        "topk_weights": torch.rand(T, K, dtype=dtype),
    }
    if weights is not None:
        tensors["topk_weights"] = torch.tensor(weights, dtype=dtype).expand(T, K).clone()
    if bias:
        tensors["gate_up_bias"] = torch.randn(E, rows, dtype=dtype)
        tensors["down_bias"] = torch.randn(E, H, dtype=dtype)
    ids = torch.rand(T, E).argsort(-1)[:, :K] if ids is None else torch.tensor(ids)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    known = {"topk_ids": ids, **(keywords or {})}
    constants = {"alpha": activation.alpha, "limit": activation.limit}
    in_reference = known | {"activation": activation.name} | constants
    return leaves, known | {"activation": activation}, in_reference


def gradients(y, leaves):
    return dict(zip(leaves, torch.autograd.grad(y.square().sum(), leaves.values()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_fused_experts(case):
    leaves, keywords, reference_keywords = make(**CASES[case])
    got = gradients(tmoe.fused_experts(**leaves, **keywords), leaves)
    if leaves["x"].shape[0] == 0:
        assert all(got[name].shape == leaf.shape for name, leaf in leaves.items())
        assert not any(got[name].any() for name in leaves)
        return
    want = gradients(fused_experts_ref(**leaves, **reference_keywords), leaves)
    for name in leaves:
        torch.testing.assert_close(got[name], want[name], msg=lambda m, name=name: f"{name}: {m}")


def test_gradcheck():
    leaves, keywords, _ = make(T=3, H=4, I=3, E=3, bias=True)
    names = list(leaves)

    def call(*values):
        return tmoe.fused_experts(**dict(zip(names, values, strict=True)), **keywords)

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))


@pytest.mark.parametrize("wanted", ["x", "gate_up_proj", "down_proj", "topk_weights", "down_bias"])
def test_only_what_is_asked_for(wanted):
    """Frozen weights get no gradient and cost none; the others' values don't depend on it."""
    leaves, keywords, reference_keywords = make(bias=True)
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    y = tmoe.fused_experts(**leaves, **keywords)
    y.sum().backward()
    (want,) = torch.autograd.grad(
        fused_experts_ref(**leaves, **reference_keywords).sum(), leaves[wanted]
    )
    torch.testing.assert_close(leaves[wanted].grad, want)
    assert all(leaf.grad is None for name, leaf in leaves.items() if name != wanted)


def test_experts_without_tokens_and_dropped_rows_get_exactly_zero():
    """PD08, PD12; the memory of what is dropped may hold NaN."""
    leaves, keywords, _ = make(ids=((0, -1), (2, 0), (-1, 9), (-1, -1)))
    with torch.no_grad():
        leaves["topk_weights"][0, 1] = NAN
        leaves["x"][3] = NAN
        leaves["gate_up_proj"][5] = NAN
    got = gradients(tmoe.fused_experts(**leaves, **keywords), leaves)
    assert all(gradient.isfinite().all() for gradient in got.values())
    for name in ("gate_up_proj", "down_proj"):
        assert not got[name][[1, 3, 4, 5]].any() and got[name][[0, 2]].any()
    assert not got["x"][2:].any()
    dropped = (keywords["topk_ids"] < 0) | (keywords["topk_ids"] > 5)
    assert not got["topk_weights"][dropped].any()


def test_transposed_storage_gets_its_gradient():
    """gpt-oss stores (E, H, 2I): the gradient reaches the parameter in its own layout."""
    leaves, keywords, _ = make()
    stored = leaves["gate_up_proj"].detach().transpose(1, 2).contiguous().requires_grad_()
    want = gradients(tmoe.fused_experts(**leaves, **keywords), leaves)["gate_up_proj"]
    y = tmoe.fused_experts(**leaves | {"gate_up_proj": stored.transpose(1, 2)}, **keywords)
    y.square().sum().backward()
    torch.testing.assert_close(stored.grad, want.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision(dtype):
    leaves, keywords, reference_keywords = make(dtype=dtype, bias=True)
    wide = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    got = gradients(tmoe.fused_experts(**leaves, **keywords), leaves)
    truth = gradients(fused_experts_ref(**wide, **reference_keywords), wide)
    for name in leaves:
        assert got[name].dtype == dtype
        error = (got[name].double() - truth[name]).norm() / truth[name].norm()
        assert error < 4 * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("recompute", [False, True])
def test_of_a_partial_sum_in_float32(recompute):
    """16-bit experts whose result isn't rounded: its gradient is fp32, theirs are not."""
    leaves, keywords, reference_keywords = make(dtype=torch.bfloat16, bias=True)
    wide = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    with tmoe.options(recompute=recompute):
        y = tmoe.fused_experts(**leaves, **keywords, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    got, truth = (
        gradients(y, leaves),
        gradients(fused_experts_ref(**wide, **reference_keywords), wide),
    )
    for name in leaves:
        assert got[name].dtype == torch.bfloat16
        error = (got[name].double() - truth[name]).norm() / truth[name].norm()
        assert error < 4 * torch.finfo(torch.bfloat16).eps, name


@pytest.mark.parametrize(
    "sizes, tail", [((2, 3), 3), ((6,), 2), ((0, 0), 0), ((4, 0), 0), ((0, 4), 0)]
)
def test_grouped_gemm(sizes, tail):
    """PD01, PD07, EM06: a NaN in the tail of `a` and of the incoming gradient touches nothing."""
    S, E = sum(sizes) + tail, len(sizes)
    a = torch.randn(S, 6, dtype=torch.float64, requires_grad=True)
    b = torch.randn(E, 5, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(E, 5, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, *sizes]).cumsum(0).int()
    dy = torch.randn(S, 5, dtype=torch.float64)
    dy[sum(sizes) :] = 0
    reference = grouped_gemm_ref(a, b, offsets, bias=bias)
    reference = reference + 0 * (a.sum() + b.sum() + bias.sum())  # gradients exist
    want = torch.autograd.grad(reference, (a, b, bias), dy)
    dy[sum(sizes) :] = NAN
    with torch.no_grad():
        a[sum(sizes) :] = NAN
    got = torch.autograd.grad(tmoe.grouped_gemm(a, b, offsets, bias=bias), (a, b, bias), dy)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_router_learns():
    """GR01, GR04: k = 1 without renormalising has a gradient, with it the weight is constant."""
    logits = torch.tensor([[1.0, 0.0]], requires_grad=True)
    want = {"Default": [0.1966, -0.1966], "RenormalizeNaive": [0.0, 0.0]}
    for method, gradient in want.items():
        weights, _ = tmoe.route(logits, tmoe.Routing(2, 1, method))
        (got,) = torch.autograd.grad(weights.sum(), logits)
        torch.testing.assert_close(got, torch.tensor([gradient]), atol=1e-4, rtol=0)


def test_every_leaf_of_moe_gets_a_gradient():
    leaves, _, _ = make(dtype=torch.float32)
    logits = torch.randn(4, 6, requires_grad=True)
    used = [leaves["x"], logits, leaves["gate_up_proj"], leaves["down_proj"]]
    tmoe.moe(*used, tmoe.Routing(6, 2, "Default")).square().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.any() for leaf in used)  # GR01


def test_a_second_derivative_is_refused():
    leaves, keywords, _ = make()
    y = tmoe.fused_experts(**leaves, **keywords)
    with pytest.raises(RuntimeError, match="fused_experts: no second derivative"):
        torch.autograd.grad(y.sum(), leaves["x"], create_graph=True)


class ForwardOnly(TritonBackend):
    name = "forward_only"

    def why_not(self, problem):
        return "has no backward, and gradients are needed" if problem.needs_grad else None


def test_a_backend_without_backward_refuses(monkeypatch):
    """GR02: no path returns a tensor that silently has no gradient."""
    leaves, keywords, _ = make(dtype=torch.float32)
    monkeypatch.setitem(registry._targets, "forward_only", f"{__name__}:ForwardOnly")
    with tmoe.options(backend="forward_only"):
        with pytest.raises(tmoe.NoBackendError, match="forward_only.*backward"):
            tmoe.fused_experts(**leaves, **keywords)
        with torch.no_grad():
            assert not tmoe.fused_experts(**leaves, **keywords).requires_grad
    assert tmoe.fused_experts(**leaves, **keywords).grad_fn is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """GR05: fp32 parameters under autocast; gradients come in the parameters' dtype."""
    leaves, keywords, _ = make(dtype=torch.float32, bias=True)
    cast = {name: leaf.detach().to(dtype) for name, leaf in leaves.items()}
    cast["topk_weights"] = leaves["topk_weights"].detach()
    with torch.autocast("cpu", dtype):
        y = tmoe.fused_experts(**leaves, **keywords)
        y.float().square().sum().backward()  # inside, as some training loops have it
    assert torch.equal(y, tmoe.fused_experts(**cast, **keywords)) and y.dtype == dtype
    assert all(leaf.grad.dtype == torch.float32 and leaf.grad.any() for leaf in leaves.values())


def test_checkpointing_changes_nothing():
    """CG12: routing is computed again, and identically."""
    leaves, _, _ = make(dtype=torch.float32)
    logits = torch.randn(4, 6, requires_grad=True)
    used = [leaves["x"], logits, leaves["gate_up_proj"], leaves["down_proj"]]
    routing = tmoe.Routing(6, 2, "Renormalize")
    plain = torch.autograd.grad(tmoe.moe(*used, routing).square().sum(), used)
    again = checkpoint(tmoe.moe, *used, routing, use_reentrant=False)
    for got, want in zip(torch.autograd.grad(again.square().sum(), used), plain, strict=True):
        assert torch.equal(got, want)


def test_gradients_repeat_bit_for_bit():
    leaves, keywords, _ = make(T=33, dtype=torch.float32, bias=True)
    first = gradients(tmoe.fused_experts(**leaves, **keywords), leaves)
    again = gradients(tmoe.fused_experts(**leaves, **keywords), leaves)
    assert all(torch.equal(first[name], again[name]) for name in leaves)
