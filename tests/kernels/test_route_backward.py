"""The router's gradient against torch's autograd of the reference: every rule, ids of all kinds."""

from __future__ import annotations

import math

import pytest
import torch

from tests.checking import assert_matches
from tests.kernels.test_route_rules import RECIPES, E, make_logits, make_recipe
from tests.layouts import STRIDED
from tmoe.kernels.route import route_ref
from tmoe.kernels.route_backward import route_backward, route_backward_ref

NAMED = {
    "TopK": {},
    "Default": dict(score="softmax"),
    "Renormalize": dict(weight="softmax"),
    "RenormalizeNaive": dict(score="softmax", renormalize=True),
    "SigmoidRenorm": dict(score="sigmoid", renormalize=True, min_sum=1e-20),
    "TopKSigmoid": dict(weight="sigmoid"),
    "DeepSeekV3": dict(score="sigmoid", bias=True, renormalize=True, epsilon=1e-20,
                       scaling_factor=2.5, n_group=5, topk_group=2),
}  # fmt: skip
RECIPES = RECIPES | NAMED
NARROW = ("Default", "Renormalize", "DeepSeekV3")


def recipe_of(name, device):
    if name not in NAMED:
        return make_recipe(name, device)
    recipe = dict(NAMED[name])
    if recipe.pop("bias", False):
        recipe["bias"] = torch.randn(E, device=device)
    return recipe


def check(logits, ids, recipe, *, weights=True, probs=True):
    num_shared, (T, K) = recipe.get("num_shared", 0), ids.shape
    d_weights = torch.randn(T, K + num_shared, device=logits.device) if weights else None
    d_probs = torch.randn(T, E, device=logits.device) if probs else None
    recipe = {"top_k": K, **recipe}
    got = route_backward(d_weights, d_probs, logits, ids, **recipe)
    assert got.dtype == logits.dtype
    naive = route_backward_ref(d_weights, d_probs, logits.float(), ids, **recipe)
    truth = route_backward_ref(d_weights, d_probs, logits.double(), ids, **recipe)
    assert_matches(got, truth, naive.to(logits.dtype))
    return got


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, torch.float32) for name in RECIPES),
        *((name, dtype) for name in NARROW for dtype in (torch.float16, torch.bfloat16)),
    ],
)
def test_every_recipe(name, dtype, device):
    recipe = recipe_of(name, device)
    for K in (1, 7):
        logits = make_logits(recipe, 5, dtype, device)
        _, ids = route_ref(logits, top_k=K, **recipe)
        got = check(logits, ids[:, :K], recipe, probs=K == 7)
        assert got.isfinite().all()


@pytest.mark.parametrize("name", RECIPES)
def test_not_finite(name, device):
    """NaN and infinite logits have gradient 0, and so has a row of them; others keep theirs."""
    recipe = recipe_of(name, device)
    logits = make_logits(recipe, 6, torch.float32, device)
    logits[1] = math.nan
    logits[2] = -math.inf
    logits[3, ::2] = math.nan
    logits[4, :3] = -math.inf
    _, ids = route_ref(logits, top_k=4, **recipe)
    ids = ids[:, :4]
    got = check(logits, ids, recipe)
    assert not got[1:3].any() and not got[3, ::2].any()
    logits[5] = 3e38  # large, not infinite
    assert route_backward(
        torch.ones(6, 4 + recipe.get("num_shared", 0), device=device), None, logits, ids, top_k=4,
        **recipe,
    ).isfinite().all()  # fmt: skip


@pytest.mark.parametrize("name", [n for n in RECIPES if n != "sparsemixer"])
def test_ids_of_the_caller(name, device):
    """Twice the same expert, and ids of none: their slots count for nothing."""
    recipe = recipe_of(name, device)
    logits = make_logits(recipe, 3, torch.float32, device)
    ids = torch.tensor([[0, 0, 5], [-1, 7, E], [E - 1, 2, -3]], device=device)
    check(logits, ids.int(), recipe)
    ids[1, 1] = 2**32 + 1
    check(logits, ids, recipe)


@pytest.mark.parametrize("layout", STRIDED)
def test_strided_memory(layout, device):
    logits, recipe = torch.randn(9, E, device=device), {"weight": "softmax"}
    _, ids = route_ref(logits, top_k=4, **recipe)
    d_weights, d_probs = torch.randn(9, 4, device=device), torch.randn(9, E, device=device)
    plain = (d_weights, d_probs, logits, ids)
    want = route_backward(*plain, top_k=4, **recipe)
    others = [STRIDED[layout](t) for t in plain[:3]]
    got = route_backward(*others, ids.T.contiguous().T, top_k=4, **recipe)
    assert torch.equal(got, want)


@pytest.mark.parametrize("experts, K", [(1, 1), (8, 2), (513, 8), (2048, 64)])
def test_sizes(experts, K, device):
    logits = torch.randn(3, experts, device=device)
    recipe = dict(top_k=K, score="softmax", renormalize=True)
    ids = torch.rand(3, experts, device=device).argsort(-1)[:, :K]
    d_weights = torch.randn(3, K, device=device)
    got = route_backward(d_weights, None, logits, ids, **recipe)
    naive = route_backward_ref(d_weights, None, logits, ids, **recipe)
    assert_matches(got, route_backward_ref(d_weights, None, logits.double(), ids, **recipe), naive)


def test_no_tokens_and_nothing_wanted(device):
    logits = torch.randn(0, E, device=device)
    ids = torch.zeros(0, 2, dtype=torch.int32, device=device)
    assert route_backward(logits[:, :2], None, logits, ids, top_k=2).shape == (0, E)
    logits = torch.randn(2, E, device=device)
    assert not route_backward(None, None, logits, ids.new_zeros(2, 2), top_k=2).any()
