"""Layers that were copied, pickled, run without gradients, compiled or updated mid-backward train
as before: plain ones, frozen ones with adapters, quantised ones with adapters."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tmoe
from tests.nn.layers import H, make_layer
from tests.nn.test_training import gradients


def adapted(scheme: str | None) -> tmoe.MoE:
    layer = make_layer("gated-shared").requires_grad_(False)
    layer = layer if scheme is None else tmoe.MoE.quantized(layer, scheme)
    tmoe.lora.add(layer, rank=4)
    for pair in layer.experts.lora.children():
        torch.nn.init.normal_(pair.lora_B)
    return layer


LAYERS = {
    "plain": partial(make_layer, "deepseek"),
    "adapters": partial(adapted, None),
    "adapters on nvfp4": partial(adapted, "nvfp4_a16"),
    "adapters on fp8": partial(adapted, "fp8_block"),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]()


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def after_inference(layer):
    with torch.inference_mode():
        layer(torch.randn(3, H))
    return layer


def loaded_in_place(layer):
    layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
    return layer


def same(got, want):
    assert got.keys() == want.keys() and sum(g is not None for g in want.values()) > 1
    for name, gradient in want.items():
        assert (got[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(got[name], gradient, msg=name)


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda layer: pickle.loads(pickle.dumps(layer)),
        saved_and_loaded,
        after_inference,
        loaded_in_place,
        lambda layer: layer.double().float(),
    ],
    ids=["deepcopy", "pickle", "torch.save", "inference", "assign", "there and back"],
)
def test_changed(change, layer):
    x = torch.randn(9, H)
    want = gradients(layer, layer, x)
    changed = change(layer)
    same(gradients(changed, changed, x), want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant, layer):
    x = torch.randn(9, H)
    want = gradients(layer, layer, x)
    same(gradients(layer, partial(checkpoint, layer, use_reentrant=reentrant), x), want)


def test_every_module_has_a_backward_hook(layer):
    """Of the whole layer and of all that is inside."""
    x, seen = torch.randn(9, H), []
    want = gradients(layer, layer, x)
    for module in layer.modules():
        module.register_full_backward_hook(lambda module, into, out: seen.append(module))
    same(gradients(layer, layer, x), want)
    assert layer in seen and layer.experts in seen


def test_an_optimizer_inside_the_backward(layer):
    """Parameters change, and gradients are freed, while later ones are still being found."""
    x = torch.randn(9, H)
    want = gradients(layer, layer, x)
    before = {name: p.detach().clone() for name, p in layer.named_parameters() if p.requires_grad}

    def step(parameter):
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.5)
        parameter.grad = None

    for name in before:
        layer.get_parameter(name).register_post_accumulate_grad_hook(step)
    gradients(layer, layer, x)
    for name, value in before.items():
        torch.testing.assert_close(layer.get_parameter(name), value - 0.5 * want[name], msg=name)


@pytest.mark.parametrize("how", ["dynamic", "checkpointed"])
@pytest.mark.parametrize("layer", ["plain", "adapters on fp8"], indirect=True)
def test_compiled(how, layer):
    torch._dynamo.reset()
    run = layer if how == "dynamic" else partial(checkpoint, layer, use_reentrant=False)
    compiled = torch.compile(
        lambda x: run(x), fullgraph=True, backend="aot_eager", dynamic=how == "dynamic"
    )
    for tokens in (3, 9) if how == "dynamic" else (9,):
        x = torch.randn(tokens, H)
        want = gradients(layer, layer, x)
        same(gradients(layer, compiled, x), want)


def test_rows_that_are_one_row(layer):
    x = torch.randn(1, H)
    want = gradients(layer, lambda x: layer(x.repeat(5, 1)), x)
    same(gradients(layer, lambda x: layer(x.expand(5, H)), x), want)
