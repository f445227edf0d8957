"""`options(main_grad=True)`: gradients of weights are added to Megatron's buffers."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.checking import assert_matches

E, K, H, I, T = 5, 2, 24, 16, 9
BACKENDS = ["torch", "triton"]


def leaves(dtype=torch.bfloat16):
    """x, both weights and topk_weights, and ids that leave out the last expert."""
    x = torch.randn(T, H).to(dtype)
    gate_up, down = torch.randn(E, 2 * I, H).to(dtype) / 4, torch.randn(E, H, I).to(dtype) / 4
    ids = torch.rand(T, E - 1).argsort(-1)[:, :K].int()
    return [t.requires_grad_() for t in (x, gate_up, down, torch.rand(T, K))], ids


def with_buffers(weights, dtype=torch.float32):
    for weight in weights:
        weight.main_grad = torch.randn(weight.shape).to(dtype)
    return [weight.main_grad.clone() for weight in weights]


def add(tensors, ids, backend, times=1, **options):
    with tmoe.options(main_grad=True, backend=backend, **options):
        for _ in range(times):
            tmoe.fused_experts(*tensors, ids).float().square().sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_added_up(backend, recompute):
    """Over two steps; x and topk_weights get theirs as always, the weights no `.grad`."""
    tensors, ids = leaves()
    held = with_buffers(tensors[1:3])
    wide = [t.detach().double().requires_grad_() for t in tensors]
    narrow = [t.detach().requires_grad_() for t in tensors]
    truth, naive = (
        torch.autograd.grad(tmoe.fused_experts(*each, ids).to(wide[0].dtype).square().sum(), each)
        for each in (wide, narrow)
    )
    add(tensors, ids, backend, times=2, recompute=recompute)
    for i, before in zip((1, 2), held, strict=True):
        weight = tensors[i]
        assert weight.grad is None and weight.main_grad.dtype == torch.float32
        want, rounded = before + 2 * truth[i], before + 2 * naive[i].float()
        assert_matches(weight.main_grad, want, rounded)
        assert torch.equal(weight.main_grad[-1], before[-1])  # of the expert without tokens
    for i in (0, 3):
        assert_matches(tensors[i].grad, 2 * truth[i], 2 * naive[i])


def test_small_gradients_are_not_lost():
    """In bf16, 1 + 2^-12 is 1: what an fp32 buffer is for."""
    ones = [torch.ones(1, 16), torch.ones(1, 16, 16), torch.ones(1, 16, 16), torch.ones(1, 1)]
    tensors = [t.bfloat16().requires_grad_() for t in ones]
    for weight in tensors[1:3]:
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    with tmoe.options(main_grad=True, backend="triton"):
        y = tmoe.fused_experts(*tensors, ids, activation="identity")
    y.backward(torch.full_like(y, 2.0**-16))
    assert torch.equal(tensors[2].main_grad, torch.full((1, 16, 16), 1 + 2.0**-12))


@pytest.mark.parametrize("backend", BACKENDS)
def test_grouped_gemm(backend):
    a, b = torch.randn(6, H), torch.randn(3, I, H).requires_grad_()
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    (before,) = with_buffers([b])
    want = torch.autograd.grad(tmoe.grouped_gemm(a, b, offsets).square().sum(), b)[0]
    with tmoe.options(main_grad=True, backend=backend):
        tmoe.grouped_gemm(a, b, offsets).square().sum().backward()
    torch.testing.assert_close(b.main_grad, before + want)
    assert b.grad is None


def test_hooks_of_megatron_run():
    """They run on `.grad`, and find it marked as added; a frozen weight's buffer stays as it is."""
    tensors, ids = leaves(torch.float32)
    gate_up, down = tensors[1:3]
    before = with_buffers([gate_up, down])
    gate_up.grad_added_to_main_grad = False
    down.requires_grad_(False)
    seen = []
    gate_up.register_post_accumulate_grad_hook(
        lambda w: seen.append((w.grad_added_to_main_grad, bool(w.grad.any())))
    )
    add(tensors, ids, None)
    assert seen == [(True, False)]
    assert not torch.equal(gate_up.main_grad, before[0]) and torch.equal(down.main_grad, before[1])


def test_a_retained_graph_adds_once_for_each_backward():
    tensors, ids = leaves(torch.float32)
    held = with_buffers(tensors[1:3])
    with tmoe.options(main_grad=True, backend="triton"):
        loss = tmoe.fused_experts(*tensors, ids).square().sum()
    loss.backward(retain_graph=True)
    first = [w.main_grad - before for w, before in zip(tensors[1:3], held, strict=True)]
    loss.backward()
    for weight, before, once in zip(tensors[1:3], held, first, strict=True):
        torch.testing.assert_close(weight.main_grad, before + 2 * once)


def test_without_the_option_a_buffer_is_left_alone():
    tensors, ids = leaves(torch.float32)
    held = with_buffers(tensors[1:3])
    tmoe.fused_experts(*tensors, ids).sum().backward()
    assert all(torch.equal(w.main_grad, h) for w, h in zip(tensors[1:3], held, strict=True))
    assert tensors[1].grad is not None


@pytest.mark.parametrize(
    "buffer, message",
    [
        (None, "main_grad must be a tensor beside each weight"),
        (torch.zeros(E, 2 * I, H + 1), r"main_grad must be floating point of shape \(5, 32, 24\)"),
        (torch.zeros(E, 2 * I, H, dtype=torch.int32), "main_grad must be floating point"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer, message):
    tensors, ids = leaves(torch.float32)
    with_buffers(tensors[1:3])
    tensors[1].main_grad = buffer
    with pytest.raises(ValueError, match=message):
        add(tensors, ids, None)


def test_compiled_code_is_refused():
    tensors, ids = leaves(torch.float32)
    with_buffers(tensors[1:3])
    compiled = torch.compile(lambda *t: tmoe.fused_experts(*t, ids), backend="aot_eager")
    with tmoe.options(main_grad=True), pytest.raises(Exception, match="main_grad must be"):
        compiled(*tensors)
