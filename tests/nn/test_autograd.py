"""What stands around a layer in training code: hooks, modes, transforms, repeated use."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import tmoe
from tests.nn.layers import H, make_layer
from tests.nn.plain import plain_moe
from tests.nn.test_training import gradients


@pytest.fixture
def layer():
    return make_layer("gated-shared")


def test_twice_in_one_graph(layer):
    """The same weights at two places of a graph: their gradients add up."""
    double, x = layer.double(), torch.randn(24, H, dtype=torch.float64)
    got = gradients(double, lambda x: layer(layer(x)), x)
    plain = partial(plain_moe, layer, dtype=torch.float64)
    want = gradients(double, lambda x: plain(plain(x)), x)
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, msg=name)


def test_accumulation_adds_up(layer):
    first, second = torch.randn(2, 24, H)
    want = [gradients(layer, layer, x) for x in (first, second)]
    want = {name: want[0][name] + want[1][name] for name in want[0] if name != "x"}
    layer.zero_grad()
    direction = (torch.arange(first.numel()) * 7 % 17 - 8).view(first.shape) / 8
    for x in (first, second):
        (layer(x) * direction).sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name])


def test_hooks_see_and_change_gradients(layer):
    """Clipping per layer, gradients freed as they come, gradients watched: all are hooks."""
    x, seen = torch.randn(8, H, requires_grad=True), []
    want = gradients(layer, layer, x.detach())
    layer.zero_grad()
    layer.experts.down_proj.register_hook(lambda g: 2 * g)
    layer.experts.gate_up_proj.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    layer.experts.register_full_backward_hook(lambda m, into, out: seen.append(into[0]))
    layer.experts.register_full_backward_pre_hook(lambda m, out: seen.append(out[0]))
    got = gradients(layer, layer, x.detach())
    torch.testing.assert_close(got["experts.down_proj"], 2 * want["experts.down_proj"])
    assert len(seen) == 3 and all(s.any() for s in seen)


def test_saved_tensors_go_through_their_hooks(layer):
    """Offloading activations to the CPU changes nothing."""
    x = torch.randn(24, H)
    want = gradients(layer, layer, x)

    def offloaded(x):
        with torch.autograd.graph.save_on_cpu():
            return layer(x)

    got = gradients(layer, offloaded, x)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_selective_checkpointing(layer):
    """The experts' result is kept, all else is computed again."""
    x, ours = torch.randn(24, H), torch.ops.tmoe.fused_experts_train
    want, kept = gradients(layer, layer, x), []

    def policy(context, op, *args, **kwargs):
        kept.append(op.overloadpacket is ours)
        return CheckpointPolicy.MUST_SAVE if kept[-1] else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    run = partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)
    got = gradients(layer, run, x)
    assert any(kept) and all(torch.equal(got[name], want[name]) for name in want)


def test_below_a_mode_of_the_dispatcher(layer):
    """FLOP counters and memory trackers call each operator again, without autograd."""
    x = torch.randn(24, H)
    want = gradients(layer, layer, x)
    with FlopCounterMode(display=False):
        got = gradients(layer, layer, x)
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient)


def test_functional_call_and_vmap(layer):
    x = torch.randn(24, H)
    want = gradients(layer, layer, x)
    others = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    names = [name for name in want if name != "x"]
    layer.zero_grad()
    direction = (torch.arange(x.numel()) * 7 % 17 - 8).view(x.shape) / 8
    y = functional_call(layer, others, (x,))
    got = torch.autograd.grad((y * direction).sum(), [others[name] for name in names])
    for name, gradient in zip(names, got, strict=True):
        torch.testing.assert_close(gradient, want[name])
    many = torch.randn(3, 5, H)
    with torch.no_grad():
        one_by_one = torch.stack([layer(x) for x in many])
        torch.testing.assert_close(vmap(layer)(many), one_by_one)


@pytest.mark.parametrize("kind", ["grad", "jacrev", "jvp", "per-sample", "forward-mode"])
def test_transforms_that_would_lose_gradients_are_refused(kind, layer):
    """GR02: forward mode would take the result for a constant and return a tangent of zeros."""
    x = torch.randn(4, H)
    layer.requires_grad_(False)

    def loss(x):
        return layer(x).sum()

    def forward_mode():
        with torch.autograd.forward_ad.dual_level():
            loss(torch.autograd.forward_ad.make_dual(x, x))

    run = {
        "grad": lambda: grad(loss)(x),
        "jacrev": lambda: jacrev(loss)(x),
        "jvp": lambda: jvp(loss, (x,), (x,)),
        "per-sample": lambda: vmap(grad(loss))(x[:, None]),
        "forward-mode": forward_mode,
    }[kind]
    with pytest.raises(RuntimeError, match="can't be differentiated by .* use torch.autograd"):
        run()


def test_a_second_backward_is_refused_unless_retained(layer):
    loss = layer(torch.randn(8, H)).sum()
    loss.backward(retain_graph=True)
    first = layer.experts.down_proj.grad.clone()
    loss.backward()
    torch.testing.assert_close(layer.experts.down_proj.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_without_gradients_nothing_is_recorded(layer):
    x = torch.randn(8, H)
    want = layer(x)
    assert want.requires_grad
    with torch.no_grad():
        assert torch.equal(layer(x), want) and not layer(x).requires_grad
    with torch.inference_mode():
        assert torch.equal(layer(x), want) and layer(x).is_inference()


def test_weights_changed_in_place_between_forward_and_backward_are_noticed(layer):
    """Else the gradient would be that of another function."""
    y = layer(torch.randn(8, H))
    with torch.no_grad():
        layer.experts.down_proj.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "trained", ["gate", "experts.gate_up_proj", "experts.down_proj", "shared_expert", "nothing"]
)
def test_any_subset_trains_as_the_whole_does(trained, layer):
    x = torch.randn(24, H)
    want = gradients(layer, layer, x)
    layer.requires_grad_(False)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    layer.zero_grad(set_to_none=True)
    got = gradients(layer, layer, x)
    for name, gradient in got.items():
        is_trained = name == "x" or layer.get_parameter(name).requires_grad
        assert (gradient is not None) == is_trained, name
        if is_trained:
            torch.testing.assert_close(gradient, want[name])


def test_ids_have_no_gradient(layer):
    ids = torch.zeros(3, 1, requires_grad=True)
    experts = layer.experts
    with pytest.raises(TypeError, match="topk_ids must have dtype int32 or int64"):
        tmoe.fused_experts(
            torch.randn(3, H), experts.gate_up_proj, experts.down_proj, torch.rand(3, 1), ids
        )
