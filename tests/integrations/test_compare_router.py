"""In a transformers that these sources don't know, a router is compared before it is replaced."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

import tmoe
from tests.integrations.families import BY_NAME
from tests.integrations.family import Family
from tests.integrations.test_router_swap import router_of
from tests.integrations.test_routers import SWAPPED
from tmoe.integrations.transformers import compare_router, routers


@pytest.fixture(autouse=True)
def unknown_transformers(monkeypatch):
    monkeypatch.setattr(routers, "is_known", lambda: False)
    monkeypatch.setattr(compare_router, "_compared", {})


@pytest.mark.parametrize("case", SWAPPED, ids=str)
def test_every_router_is_found_alike(case):
    router = case.build(case.config(case.configs[0]))
    state = torch.get_rng_state()
    report = tmoe.replace_moe(router)
    assert report.routers == [""], report.skipped
    assert torch.equal(torch.get_rng_state(), state)


FORWARD = MixtralTopKRouter.forward
CHANGES = {
    "another order": lambda self, x: FORWARD(self, x)[::-1],
    "one more": lambda self, x: (*FORWARD(self, x), x),
    "another dtype": lambda self, x: tuple(t.double() for t in FORWARD(self, x)),
    "a factor": lambda self, x: (lambda l, w, i: (l, 2 * w, i))(*FORWARD(self, x)),
    "the worst experts": lambda self, x: FORWARD(self, -x),
    "another argument": lambda self, x, mask: FORWARD(self, x),
    "no tuple": lambda self, x: FORWARD(self, x)[0],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change, monkeypatch):
    router = router_of("mixtral")
    monkeypatch.setattr(MixtralTopKRouter, "forward", CHANGES[change])
    report = tmoe.replace_moe(router)
    assert type(router) is MixtralTopKRouter and report.routers == []
    assert report.skipped[""].startswith("in this transformers it is not what it was in 5.24: ")


def test_once_a_class_and_without_its_weights():
    family: Family = BY_NAME["mixtral"]
    model = family.build()
    calls = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *args: calls.append(args))
        layer.mlp.gate.weight.data.fill_(float("nan"))
    assert len(tmoe.replace_moe(model).routers) == 2
    assert list(compare_router._compared) == [routers.TmoeMixtralTopKRouter]
    assert calls == []


def test_of_a_block_only_what_routes_is_made_again():
    """DBRX's block selects, and holds all its experts."""
    block = BY_NAME["dbrx"].build().transformer.blocks[0].ffn
    twin = compare_router._twin(block, torch.Generator(), whole=False)
    assert twin.experts is block.experts and type(twin) is type(block)
