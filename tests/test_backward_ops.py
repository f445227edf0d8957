"""The ops of training as torch sees them, and who may write over what the forward kept."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tmoe
from tmoe import registry
from tmoe.backends.triton_backend import TritonBackend
from tmoe.library import operator
from tmoe.library.operation import Operation

E, K, H, I, T = 4, 2, 16, 8, 5
SPEC = ("swiglu", 1.0, float("inf"), False, False, 0, E, False)
WANTED = [True, True, True, True, False, True]


def tensors(dtype=torch.float32):
    x, gate_up, down = torch.randn(T, H), torch.randn(E, 2 * I, H) / 4, torch.randn(E, H, I) / 4
    return [t.to(dtype) for t in (x, gate_up, down)] + [torch.rand(T, K)]


def arguments():
    ids = torch.rand(T, E).argsort(-1)[:, :K].int()
    return (*tensors(), ids, None, torch.randn(E, H), *SPEC)


def gemm_arguments():
    return torch.randn(6, H), torch.randn(3, I, H), torch.tensor([0, 2, 2, 5]).int(), None


def test_opcheck_of_the_training_forward():
    """With gradients, so that torch checks the registered backward under its compiler too."""
    args = [
        a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in arguments()
    ]
    torch.library.opcheck(operator("fused_experts_train"), args)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kept", [True, False])
def test_opcheck_of_the_backward(kept, backend):
    args = arguments()
    y, hidden = operator("fused_experts_train")(*args)
    hidden = hidden if kept else hidden.new_empty(0)
    backward = operator("fused_experts_backward")
    torch.library.opcheck(backward, (torch.randn_like(y), *args, hidden, WANTED, backend, False))


def test_opcheck_of_the_backward_of_grouped_gemm():
    args = gemm_arguments()
    dy, kept = torch.randn(6, I), torch.empty(0)
    backward = operator("grouped_gemm_backward")
    torch.library.opcheck(backward, (dy, *args, kept, [True, True, False], None, False))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_opcheck_of_the_routers_backward(backend):
    recipe = tmoe.Routing(E, K, "Renormalize").json
    logits, ids = torch.randn(T, E), torch.rand(T, E).argsort(-1)[:, :K].int()
    args = (logits, None, None, ids, recipe, torch.float32, torch.int32, True, False)
    grads = [torch.randn(T, K), torch.randn(T, E)]
    backward = operator("route_backward")
    torch.library.opcheck(backward, (grads, *args, [True, False], backend))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_opcheck_of_the_backward_that_writes(backend):
    """It says what it changes: the schema is compared with what was changed."""
    args = arguments()
    y, kept = operator("fused_experts_train")(*args)
    dy, sums = torch.randn_like(y), [torch.randn(E, 2 * I, H)]
    tail = (WANTED, backend, False)
    plain = operator("fused_experts_backward")(dy, *args, kept, *tail)
    writes = operator("fused_experts_backward_")
    checks = ("test_schema", "test_faketensor")  # it is never traced: see test_not_while_compiled
    given = (dy, *args, kept.clone(), sums, [1], *tail)
    torch.library.opcheck(writes, given, test_utils=checks)
    before, versions = sums[0].clone(), (kept._version, sums[0]._version)
    x, down, *rest = writes(dy, *args, kept, sums, [1], *tail)
    for got, want in zip((x, down, *rest), (plain[0], *plain[2:]), strict=True):
        assert torch.equal(got, want)
    torch.testing.assert_close(sums[0], before + plain[1])
    assert (kept._version > versions[0]) and (sums[0]._version > versions[1])


class Watched(TritonBackend):
    name = "watched"
    written: list[bool] = []

    def experts_backward(self, *args):
        Watched.written.append(args[-2])
        return TritonBackend.experts_backward(*args)


@pytest.fixture
def written(monkeypatch):
    """Whether each backward was allowed to write over what the forward kept."""
    monkeypatch.setitem(registry._targets, "watched", f"{__name__}:Watched")
    monkeypatch.setattr(Watched, "written", [])
    with tmoe.options(backend="watched"):
        yield Watched.written


def leaves_and_ids():
    leaves = [t.requires_grad_() for t in tensors()]
    return leaves, torch.rand(T, E).argsort(-1)[:, :K].int()


def test_a_retained_graph_can_be_walked_again(written):
    """Twice the same gradients; the last walk may write, and after it torch refuses another."""
    leaves, ids = leaves_and_ids()
    loss = tmoe.fused_experts(*leaves, ids).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    for got, want in zip(second, first, strict=True):
        assert torch.equal(got, want)
    assert written == [False, True]
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(loss, leaves)


def test_two_losses_of_one_forward(written):
    """A graph that is retained by one of two parts: the second part still finds what was kept."""
    leaves, ids = leaves_and_ids()
    y = tmoe.fused_experts(*leaves, ids)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    got = [leaf.grad for leaf in leaves]
    y = tmoe.fused_experts(*leaves, ids)
    want = torch.autograd.grad(y.sum() + y.square().sum(), leaves)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert written == [False, True, True]


def test_not_while_compiled(written):
    leaves, ids = leaves_and_ids()
    compiled = torch.compile(
        lambda *t: tmoe.fused_experts(*t, ids), backend="aot_eager", fullgraph=True
    )
    want = torch.autograd.grad(tmoe.fused_experts(*leaves, ids).square().sum(), leaves)
    got = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert written == [True, False]


def test_saved_tensors_that_are_kept_elsewhere(written):
    """Hooks that hand back a copy, as offloading to the CPU does."""
    leaves, ids = leaves_and_ids()
    with torch.autograd.graph.save_on_cpu():
        loss = tmoe.fused_experts(*leaves, ids).square().sum()
    got = torch.autograd.grad(loss, leaves)
    want = torch.autograd.grad(tmoe.fused_experts(*leaves, ids).square().sum(), leaves)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_while_a_mode_looks_on(backend, recompute):
    """A mode calls an op below autograd, by which the torch backend differentiates."""
    layer = tmoe.MoE(H, I, tmoe.Routing(E, K, "Renormalize"))
    x = torch.randn(T, H, requires_grad=True)
    leaves = [x, *layer.parameters()]
    with tmoe.options(backend=backend, recompute=recompute):
        want = torch.autograd.grad(layer(x).square().sum(), leaves)
        with FlopCounterMode(display=False):
            layer(x).square().sum().backward()
    for leaf, gradient in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("want_probs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_routers_gradient_comes_from_the_backend(dtype, want_probs, monkeypatch):
    """The one that the forward was on, without options at the time of the backward."""
    logits = torch.randn(T, E).to(dtype).requires_grad_()
    routing = tmoe.Routing(E, K, "RenormalizeNaive")
    found = {}
    for backend in ("torch", "triton"):
        if backend == "triton":
            monkeypatch.setattr(Operation, "_by_torch", None)
        with tmoe.options(backend=backend):
            weights, ids, *probs = tmoe.route(logits, routing, return_probs=want_probs)
        loss = (weights * (ids + 1)).sum() + sum(p[:, 0].square().sum() for p in probs)
        (found[backend],) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found["triton"], found["torch"])
    assert found["torch"].any()


def test_the_gradient_of_an_experts_factor():
    """It is torch's to find, beside a backend that has the logits' gradient."""
    rule = tmoe.RoutingRule(score="sigmoid", takes_expert_scale=True)
    leaves = [torch.randn(T, E).requires_grad_(), torch.rand(E).requires_grad_()]
    found = []
    for backend in ("torch", "triton"):
        with tmoe.options(backend=backend):
            weights, _ = tmoe.route(leaves[0], tmoe.Routing(E, K, rule), expert_scale=leaves[1])
        found.append(torch.autograd.grad(weights.square().sum(), leaves))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
