"""The router kernel: what RoutingRule offers beyond the named methods, and its optional outputs."""

from __future__ import annotations

import math

import pytest
import torch

from tests.checking import assert_matches
from tmoe.kernels.route import route, route_ref
from tmoe.kernels.route_ref import count_ref, softmax_ref

E = 60
SUM = dict(renormalize=True, epsilon=1e-20)
GROUPS = dict(n_group=5, topk_group=2)
RECIPES = {
    "sqrtsoftplus": dict(score="sqrtsoftplus", bias=True, scaling_factor=1.5, **SUM),
    "softmax with a bias": dict(score="softmax", bias=True, renormalize=True, min_sum=1e-12),
    "groups by their best": dict(score="softmax", group_score="max", scaling_factor=16.0, **GROUPS),
    "groups by their two best": dict(score="softmax", **GROUPS, **SUM),
    "other groups compete with 0": dict(
        score="sigmoid", bias=True, ruled_out="zero", **GROUPS, **SUM
    ),
    "logit and bias, sigmoid after": dict(weight="sigmoid", bias=True, renormalize=True),
    "scale and softcap": dict(
        score="sigmoid", bias=True, logit_scale=0.3, logit_softcap=2.0, renormalize=True
    ),
    "a large scale": dict(score="sigmoid", logit_scale=1e38, renormalize=True, min_sum=1e-20),
    "a scale for each expert": dict(score="softmax", expert_scale=True, renormalize=True),
    "shared experts": dict(score="sigmoid", bias=True, num_shared=2, renormalize=True),
    "shared experts, none selected by score": dict(
        weight="sigmoid", bias=True, num_shared=3, renormalize=True
    ),
    "sparsemixer": dict(weight="sparsemixer", jitter=0.1),
}


def make_recipe(name, device):
    recipe = dict(RECIPES[name])
    for tensor in ("bias", "expert_scale"):
        if recipe.pop(tensor, False):
            recipe[tensor] = torch.randn(E, device=device)
    return recipe


def make_logits(recipe, T, dtype, device):
    return torch.randn(T, E + recipe.get("num_shared", 0), device=device).to(dtype)


def check(logits, **recipe):
    """Same ids as the reference in fp32; weights as close to fp64 as the reference's."""
    weights, ids = route(logits, **recipe)
    naive, ids_ref = route_ref(logits, **recipe)
    truth, ids_truth = route_ref(logits.double(), **recipe)
    assert torch.equal(ids, ids_ref)
    assert torch.equal(ids, ids_truth), "scores too close for this test; change the input"
    assert_matches(weights, truth, naive)
    return weights, ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_and_dtype(name, dtype, device):
    recipe = make_recipe(name, device)
    for K in (1, 2, 7):
        check(make_logits(recipe, 5, dtype, device), top_k=K, **recipe)


@pytest.mark.parametrize("name", RECIPES)
def test_not_finite(name, device):
    recipe = make_recipe(name, device)
    logits = make_logits(recipe, 6, torch.float32, device)
    logits[1] = math.nan
    logits[2] = -math.inf
    logits[3, ::2] = math.nan
    logits[4, :3] = math.inf
    logits[5, 4:] = -math.inf
    weights, ids = route(logits, top_k=4, **recipe)
    assert torch.equal(ids, route_ref(logits, top_k=4, **recipe)[1])
    assert weights.isfinite().all() and (weights[1:3] == 0).all()
    dead = torch.gather(~(logits > -math.inf), 1, ids.long())
    assert (weights[dead] == 0).all()
    for row in ids.tolist():
        assert len(set(row)) == len(row) and min(row) >= 0 and max(row) < logits.shape[1]


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_does_not_depend_on_its_batch(name, device):
    recipe = make_recipe(name, device)
    logits = make_logits(recipe, 33, torch.bfloat16, device)
    weights, ids = route(logits, top_k=4, **recipe)
    for t in (0, 17, 32):
        alone = route(logits[t : t + 1], top_k=4, **recipe)
        assert torch.equal(alone[0][0], weights[t]) and torch.equal(alone[1][0], ids[t])


@pytest.mark.parametrize("function", [route, route_ref])
def test_other_groups_that_compete_with_zero_can_win(function, device):
    """RT01's input, read as A.X-K2 does it: the biased scores of the kept group are negative."""
    logits = torch.tensor([[2.1972, 1.3863, -0.8473, -1.3863]], device=device)
    recipe = dict(top_k=2, score="sigmoid", n_group=2, topk_group=1, **SUM)
    bias = torch.tensor([-1.5, -1.6, -3.0, -3.0], device=device)
    assert function(logits, bias=bias, **recipe)[1].tolist() == [[0, 1]]
    weights, ids = function(logits, bias=bias, ruled_out="zero", **recipe)
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.6, 0.4]]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("function", [route, route_ref])
def test_sparsemixer_by_hand(function, device):
    """1: softmax over 4, 3.9 (2 is too far away). 2: over 3.9 alone, once 4 is gone."""
    logits = torch.tensor([[3.9, 2.0, 4.0, -1.0], [0.0, 0.0, 0.0, 0.0]], device=device)
    weights, ids = function(logits, top_k=2, weight="sparsemixer", jitter=0.1)
    assert ids.tolist() == [[2, 0], [0, 1]]
    wanted = torch.tensor([[1 / (1 + math.exp(-0.1)), 1.0], [1 / 4, 1 / 3]])
    torch.testing.assert_close(weights.cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16], ids=str)
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "sparsemixer"])
def test_given_ids(name, dtype, device):
    """The ids that were selected have the weights that they had; others have the formula's."""
    recipe = make_recipe(name, device)
    recipe.pop("bias", None)
    logits = make_logits(recipe, 4, torch.float32, device)
    weights, ids = route(logits, top_k=3, **recipe)
    given = ids[:, :3].to(dtype).t().contiguous().t()
    again, same_ids = route(logits, top_k=3, topk_ids=given, **recipe)
    assert torch.equal(again, weights) and torch.equal(same_ids, ids)
    twice = torch.tensor([[3, 59, 3]], device=device).expand(4, 3)
    check(logits, top_k=3, topk_ids=twice, **recipe)


def test_given_ids_out_of_range_have_no_weight(device):
    """2**32 + 1 must not be cut down to expert 1."""
    logits = torch.randn(2, E, device=device)
    given = torch.tensor([[4, -1, E], [2**32 + 1, 5, -(2**31)]], device=device)
    weights, ids = route(logits, top_k=3, score="sigmoid", topk_ids=given, renormalize=True)
    assert ids.tolist() == [[4, -1, -1], [-1, 5, -1]]
    assert weights.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    ref, ids_ref = route_ref(logits, top_k=3, score="sigmoid", topk_ids=given, renormalize=True)
    assert torch.equal(ids, ids_ref) and torch.equal(weights, ref)


@pytest.mark.parametrize("constants", [{}, {"logit_scale": 0.3, "logit_softcap": 2.0}])
@pytest.mark.parametrize("num_shared", [0, 2])
@pytest.mark.parametrize("experts", [1, 5, 60, 128])
def test_probs_and_counts(experts, num_shared, constants, device):
    """Probabilities are those of the logits, whatever the scores make of these."""
    logits = torch.randn(9, experts + num_shared, device=device)
    logits[2, 0] = math.nan
    probs = torch.empty(9, experts, device=device)
    counts = torch.full((experts,), 100, dtype=torch.int32, device=device)
    recipe = dict(top_k=min(3, experts), score="sigmoid", num_shared=num_shared, **constants)
    weights, ids = route(logits, probs=probs, expert_counts=counts, **recipe)
    assert torch.equal(counts - 100, count_ref(ids, experts))
    routed = logits[:, :experts]
    assert_matches(probs, softmax_ref(routed.double()), softmax_ref(routed))
    plain = route(logits, **recipe)
    assert torch.equal(plain[0], weights) and torch.equal(plain[1], ids)


def test_reference_gradients(device):
    """What trains: the gradients of the reference are those of its formulas."""
    for name in RECIPES:
        recipe = {
            key: value.double() if isinstance(value, torch.Tensor) else value
            for key, value in make_recipe(name, device).items()
        }
        if recipe.get("logit_scale", 1.0) > 1:
            continue  # saturated: the gradient is 0
        logits = make_logits(recipe, 2, torch.float64, device).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x, recipe=recipe: route_ref(x, top_k=3, **recipe)[0], logits
        )
