"""`Routing`: what it refuses, and what it says of itself."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

from tmoe.kernels.route import route_ref
from tmoe.routing import RULES, Routing, RoutingMethod

FLASHINFER_NAMES = (
    "Default Renormalize DeepSeekV3 Llama4 RenormalizeNaive TopK SigmoidRenorm MiniMax2 Sigmoid "
    "TopKSigmoid"
).split()


def test_methods():
    assert [method.name for method in RoutingMethod] == FLASHINFER_NAMES
    assert set(RULES) == set(RoutingMethod)


def test_a_name_or_a_member():
    by_name, by_member = Routing(8, 2, "Default"), Routing(8, 2, RoutingMethod.Default)
    assert by_name == by_member and hash(by_name) == hash(by_member)
    assert by_name.method is RoutingMethod.Default
    assert by_name != Routing(8, 2, "Renormalize")


def test_frozen_and_copyable():
    routing = Routing(256, 8, "DeepSeekV3", n_group=8, topk_group=4, scaling_factor=2.5)
    for twin in (copy.deepcopy(routing), pickle.loads(pickle.dumps(routing))):
        assert twin == routing
    assert dataclasses.replace(routing, top_k=4).top_k == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        routing.top_k = 4


def test_method_is_required():
    with pytest.raises(TypeError, match="method"):
        Routing(8, 2)


REFUSED = {
    "top_k=5 num_experts=4": ((4, 5, "Default"), {}, r"top_k must be at most num_experts=4, got 5"),
    "top_k=0": ((4, 0, "Default"), {}, r"top_k must be at least 1, got 0"),
    "top_k=-1": ((4, -1, "Default"), {}, r"top_k must be at least 1, got -1"),
    "num_experts=0": ((0, 1, "Default"), {}, r"num_experts must be at least 1, got 0"),
    "unknown method": ((4, 2, "Softmax"), {}, r"method must be one of Default, .*got 'Softmax'"),
    "Llama4 top_k=2": ((4, 2, "Llama4"), {}, r"top_k must be 1 with Llama4, got 2"),
    "groups that do not divide": (
        (10, 2, "DeepSeekV3"),
        dict(n_group=4, topk_group=2),
        r"n_group must be a divisor of num_experts=10, got 4",
    ),
    "topk_group > n_group": (
        (8, 2, "DeepSeekV3"),
        dict(n_group=2, topk_group=3),
        r"topk_group must be at most n_group=2, got 3",
    ),
    "n_group=0": ((8, 2, "DeepSeekV3"), dict(n_group=0), r"n_group must be at least 1, got 0"),
    "too few experts left": (
        (8, 5, "DeepSeekV3"),
        dict(n_group=4, topk_group=2),
        r"top_k must be at most 4, the experts in the 2 kept groups of 2, got 5",
    ),
    "infinite factor": (
        (8, 2, "DeepSeekV3"),
        dict(scaling_factor=float("inf")),
        r"scaling_factor must be finite, got inf",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    args, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        Routing(*args, **options)


@pytest.mark.parametrize("method", RoutingMethod, ids=lambda method: method.name)
def test_an_argument_that_the_method_does_not_use_is_refused(method):
    """RT20, SC06: never ignored."""
    rule, name = RULES[method], method.name
    if not rule.takes_groups:
        with pytest.raises(ValueError, match=f"n_group must be 1 with {name}.*got 2"):
            Routing(8, 1, method, n_group=2)
    if not rule.takes_scaling_factor:
        with pytest.raises(ValueError, match=f"scaling_factor must be 1 with {name}.*got 2.5"):
            Routing(8, 1, method, scaling_factor=2.5)
    Routing(8, 1, method, n_group=1, topk_group=1, scaling_factor=1)


def test_wrong_types():
    for args in (("8", 2, "Default"), (8, 2.0, "Default"), (8, 2, 1)):
        with pytest.raises(TypeError):
            Routing(*args)
    with pytest.raises(TypeError, match="n_group must be an int, got NoneType"):
        Routing(8, 2, "DeepSeekV3", n_group=None)


def test_what_a_method_takes():
    def methods(fact):
        return {method.name for method, rule in RULES.items() if getattr(rule, fact)}

    assert methods("takes_bias") == methods("takes_scaling_factor") == {"DeepSeekV3", "MiniMax2"}
    assert methods("takes_groups") == {"DeepSeekV3"}
    assert methods("weight_on_input") == {"Llama4"}


def test_weight_on_input():
    assert Routing(16, 1, "Llama4").weight_on_input
    assert not Routing(16, 1, "TopKSigmoid").weight_on_input
    assert Routing(16, 1, "TopKSigmoid", weight_on_input=True).weight_on_input


def test_renormalizes():
    """What it says is what the weights do."""
    logits = torch.randn(6, 12)
    for method in RoutingMethod:
        factor = 2.5 if RULES[method].takes_scaling_factor else 1.0
        routing = Routing(12, 1, method, scaling_factor=factor)
        weights, _ = route_ref(logits, **routing.kernel_arguments)
        constant = torch.allclose(weights, torch.tensor(factor))
        assert routing.renormalizes == constant, method
