"""The swap of a router: hooks, parametrisations, numbers that change, noise, what is left alone."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

import tmoe
from tests.integrations.families import BY_NAME
from tests.integrations.family import DEVICE, IDS, outputs
from tmoe.integrations.transformers import router_kinds, routers

X = torch.randn(7, 64, generator=torch.Generator().manual_seed(4)).to(DEVICE)


def router_of(name: str, model: nn.Module | None = None) -> nn.Module:
    """The first router of a tiny model that tmoe knows."""
    model = BY_NAME[name].build() if model is None else model
    return next(module for module in model.modules() if routers.router_for(module) is not None)


def test_every_class_is_an_attribute_of_the_module():
    """Which is how pickle finds it; the same object each time."""
    for folder, names in router_kinds.ROUTERS.items():
        for name in names:
            try:
                cls = getattr(routers, f"Tmoe{name}")
            except (ModuleNotFoundError, AttributeError):
                continue  # another version of transformers
            assert cls.__name__ == cls.__qualname__ == f"Tmoe{name}"
            assert cls is getattr(routers, f"Tmoe{name}")
            assert cls.__bases__[0].__module__.split(".")[2] == folder
    with pytest.raises(AttributeError, match="has no attribute 'TmoeNothing'"):
        _ = routers.TmoeNothing


@pytest.mark.parametrize("name", ["mixtral", "dbrx", "llama4_text"])
def test_without_routers(name):
    """They stay transformers' own, unless they are on tmoe already; the experts run the same."""
    model = BY_NAME[name].build()
    router = router_of(name, model)
    original = type(router)
    report = tmoe.replace_moe(model, routers=False)
    assert type(router) is original and not report.routers
    assert len(report.replaced) == BY_NAME[name].layers
    with torch.no_grad():
        want = outputs(model)
        tmoe.replace_moe(model)
        assert type(router) is not original
        assert tmoe.replace_moe(model, routers=False).routers
        torch.testing.assert_close(outputs(model), want)
    with pytest.raises(TypeError, match="replace_moe: routers must be a bool"):
        tmoe.replace_moe(model, routers=1)


def test_a_pickle_loads_in_another_process(tmp_path):
    model = BY_NAME["mixtral"].build()
    tmoe.replace_moe(model)
    torch.save(model.cpu(), tmp_path / "model.pt")
    torch.save(outputs(model.to(DEVICE)).detach().cpu(), tmp_path / "want.pt")
    code = f"""
import torch, tmoe
tmoe.integrations.transformers.register()
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
want = torch.load({str(tmp_path / "want.pt")!r})
assert type(model.model.layers[0].mlp.gate).__name__ == "TmoeMixtralTopKRouter"
got = model(input_ids=torch.tensor({IDS.tolist()})).logits
torch.testing.assert_close(got, want)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("name", ["mixtral", "phimoe"])
def test_noise_of_training_is_kept(name):
    """Mixtral's block shakes its input, PhiMoE's router also samples: the same random numbers."""
    model = BY_NAME[name].build().train()
    for module in model.modules():
        for noise in ("jitter_noise", "input_jitter_noise"):
            if hasattr(module, noise):
                setattr(module, noise, 0.1)
    seen = []
    for replace in (False, True):
        if replace:
            assert len(tmoe.replace_moe(model).routers) == 2
        torch.manual_seed(7)
        y = outputs(model)
        model.zero_grad()
        y.square().sum().backward()
        seen.append((y, router_of(name, model).weight.grad))
    for theirs, ours in zip(*seen, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert not torch.equal(seen[1][0], outputs(model))  # there is noise


def test_numbers_that_change_are_followed():
    """``router.top_k`` is read at each call, as in transformers."""
    router = router_of("mixtral")
    tmoe.replace_moe(router)
    for top_k in (1, 3, 8):
        router.top_k = top_k
        ours, theirs = router(X), MixtralTopKRouter.forward(router, X)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)


def test_hooks_and_layers_inside_are_called():
    """A hook on the router, and one on Hunyuan's linear layer, to which LoRA would be added."""
    router = router_of("hunyuan_v1_moe")
    tmoe.replace_moe(router)
    calls = []
    for module in (router, router.wg):
        module.register_forward_hook(lambda module, args, out: calls.append(type(module).__name__))
    router(X)
    assert calls == ["Linear", "TmoeHunYuanMoEV1Gate"]


def test_a_parametrised_weight_is_read_once():
    reads = []

    class Adapted(nn.Module):
        def forward(self, weight):
            reads.append(weight)
            return weight + 0.1

    router = router_of("deepseek_v3")
    parametrize.register_parametrization(router, "weight", Adapted())
    want = router(X)
    report = tmoe.replace_moe(router)
    assert report.routers == [""] and type(router).__name__.startswith("ParametrizedTmoe")
    reads.clear()
    got = router(X)
    assert len(reads) == 1
    torch.testing.assert_close(got[0], want[0])
    got[1].sum().backward()
    assert router.parametrizations.weight.original.grad is not None
    report.restore()
    assert type(router).__name__ == "ParametrizedDeepseekV3TopkRouter"


def test_a_foreign_forward_or_class_is_left_alone():
    class OurUsersRouter(MixtralTopKRouter):
        pass

    model = BY_NAME["mixtral"].build()
    first, second = (layer.mlp.gate for layer in model.model.layers)
    old = first.forward
    first.forward = lambda *args: old(*args)
    second.__class__ = OurUsersRouter
    with torch.no_grad():
        want = outputs(model)
        report = tmoe.replace_moe(model)
        torch.testing.assert_close(outputs(model), want)
    assert report.routers == [] and len(report.replaced) == 2
    assert "another library" in report.skipped["model.layers.0.mlp.gate"]
    assert "OurUsersRouter is not a router that" in report.skipped["model.layers.1.mlp.gate"]
    assert "model.layers.1.mlp: experts; the router is transformers'" in str(report)
    assert type(second) is OurUsersRouter


def test_what_a_recipe_does_not_know_is_left_alone():
    """A number outside the recipe or missing, weights of another dtype or number of rows."""
    model = BY_NAME["phimoe"].build()
    first, second = (layer.mlp.router for layer in model.model.layers)
    first.top_k = 4
    del second.router_jitter_noise
    reasons = tmoe.replace_moe(model).skipped
    assert "always selects 2 experts" in reasons["model.layers.0.mlp.router"]
    assert "no attribute 'router_jitter_noise'" in reasons["model.layers.1.mlp.router"]
    router = router_of("deepseek_v3")
    router.weight.data = router.weight.data.to(torch.float8_e4m3fn)
    assert "float8_e4m3fn" in tmoe.replace_moe(router).skipped[""]
    router = router_of("mixtral")
    router.weight.data = router.weight.data[:6]
    assert "has 6 rows, and its numbers say 8 experts" in tmoe.replace_moe(router).skipped[""]


def test_weights_of_a_part_that_is_not_loaded():
    """Ernie's bias is in a module of its own, which accelerate would load when it is called."""
    model = BY_NAME["ernie4_5_moe"].build()
    router = router_of("ernie4_5_moe", model)
    router.moe_statics.to("meta")
    (reason,) = tmoe.replace_moe(model).skipped.values()
    assert "offloaded" in reason


MECHANISMS = ["mixtral", "afmoe", "gemma4_text", "inkling_text", "llama4_text", "dbrx", "jetmoe"]


@pytest.mark.parametrize("name", MECHANISMS)
def test_nothing_keeps_the_weights(name):
    """Neither the report, nor a copy that is gone, nor what the routers remember."""
    model = BY_NAME[name].build()
    report = tmoe.replace_moe(model)
    with torch.no_grad():
        outputs(copy.deepcopy(model))
        outputs(model)
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not [reference for reference in alive if reference() is not None]
    report.restore()


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gemma4_text"])
def test_runs_on_meta(name):
    """Shapes without memory: what plans where a model goes, or counts its operations."""
    model = BY_NAME[name].build()
    tmoe.replace_moe(model)
    ids = torch.zeros(2, 5, dtype=torch.long, device="meta")
    mask = torch.zeros(2, 1, 5, 5, device="meta")
    with torch.no_grad():
        logits = model.to("meta")(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert logits.is_meta and logits.shape == (2, 5, 128)
