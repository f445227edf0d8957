"""The router kernel and its reference on logits whose result can be computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tmoe.kernels.route import route, route_ref

PLAIN = dict(weight="softmax")  # Renormalize
SIGMOID = dict(score="sigmoid", renormalize=True, epsilon=1e-20)  # DeepSeekV3
NAN, INF = math.nan, math.inf

# Hand-computed: logits, recipe, ids, weights.
CASES = {
    "RT01 losing groups are out, not 0": (
        [2.1972, 1.3863, -0.8473, -1.3863],
        SIGMOID | dict(bias=[-1.5, -1.6, -3.0, -3.0], n_group=2, topk_group=1),
        [0, 1],
        [0.5294, 0.4706],
    ),
    "RT03 the bias selects and never weighs": (
        [0.0, 0.0, 0.0, 0.0],
        SIGMOID | dict(bias=[1.0, 0.0, 0.0, 0.5]),
        [0, 3],
        [0.5, 0.5],
    ),
    "RT12 all scores underflow": (
        [-100.0] * 4,
        SIGMOID | dict(bias=[4.0, 3.0, 2.0, 1.0]),
        [0, 1],
        [0.0, 0.0],
    ),
    "RT12 the same with a smallest sum": (
        [-100.0] * 4,
        dict(score="sigmoid", renormalize=True, min_sum=1e-20),
        [0, 1],
        [0.0, 0.0],
    ),
    "RT13 softmax, not renormalised": (
        [2.0, 1.0, 0.0, -1.0],
        dict(score="softmax"),
        [0, 1],
        [0.6439, 0.2369],
    ),
    "RT13 softmax of the selected": ([2.0, 1.0, 0.0, -1.0], PLAIN, [0, 1], [0.7311, 0.2689]),
    "RT13 softmax, divided by the sum": (
        [2.0, 1.0, 0.0, -1.0],
        dict(score="softmax", renormalize=True),
        [0, 1],
        [0.7311, 0.2689],
    ),
    "RT14 sigmoid, not renormalised": (
        [1.0, 0.0, -1.0, -2.0],
        dict(score="sigmoid"),
        [0, 1],
        [0.7311, 0.5],
    ),
    "RT14 sigmoid, divided by the sum": (
        [1.0, 0.0, -1.0, -2.0],
        SIGMOID,
        [0, 1],
        [0.5938, 0.4062],
    ),
    "SC03 the factor, renormalised": (
        [1.0, 0.0, -1.0, -2.0],
        SIGMOID | dict(scaling_factor=2.5),
        [0, 1],
        [1.484612, 1.015388],
    ),
    "SC03 the factor, not renormalised": (
        [1.0, 0.0, -1.0, -2.0],
        dict(score="sigmoid", scaling_factor=2.5),
        [0, 1],
        [1.827646, 1.25],
    ),
    "RT21 descending order": (
        [0.0, 3.0, 1.0, 2.0],
        dict(score="logit"),
        [1, 3, 2],
        [3.0, 2.0, 1.0],
    ),
    "RT18 biases that bf16 cannot tell apart": (
        [0.0] * 8,
        SIGMOID | dict(bias=[34.5 + 0.01 * e for e in range(8)]),
        [7, 6],
        [0.5, 0.5],
    ),
    "saturated sigmoids are a tie": (
        [30.0, 40.0, 0.0, 50.0],
        dict(score="sigmoid"),
        [0, 1],
        [1.0, 1.0],
    ),
    "sigmoid after the selection is not": (
        [30.0, 40.0, 0.0, 50.0],
        dict(weight="sigmoid"),
        [3, 1],
        [1.0, 1.0],
    ),
    "the two zeros are a tie": (
        [-0.0, 0.0, -0.0, 0.0],
        dict(weight="softmax"),
        [0, 1],
        [0.5, 0.5],
    ),
    "an epsilon is added to the sum": (
        [1.0, 0.0, -1.0, -2.0],
        dict(score="sigmoid", renormalize=True, epsilon=1.0),
        [0, 1],
        [0.7311 / 2.2311, 0.5 / 2.2311],
    ),
    "a smallest sum is not": (
        [1.0, 0.0, -1.0, -2.0],
        dict(score="sigmoid", renormalize=True, min_sum=1.0),
        [0, 1],
        [0.5938, 0.4062],
    ),
    "a tie of groups": (
        [0.0, 1.0, 1.0, 0.0, 1.0, 0.0],
        SIGMOID | dict(n_group=3, topk_group=2),
        [1, 2],
        [0.5, 0.5],
    ),
    "RT04 groups of one expert": (
        [0.0, 3.0, 1.0, 2.0, -1.0, 5.0, -2.0, 4.0],
        SIGMOID | dict(n_group=8, topk_group=4),
        [5, 7, 1, 3],
        [0.260800, 0.257835, 0.250105, 0.231260],
    ),
    "an expert ruled out by its bias": (
        [3.0, 2.0, 1.0, 0.0],
        SIGMOID | dict(bias=[-INF, 0.0, NAN, 0.0]),
        [1, 3],
        [0.6379, 0.3621],
    ),
    "a kept group with one live expert": (
        [5.0, -INF, 0.0, 0.0],
        SIGMOID | dict(bias=[0.0, -INF, -2.0, -2.0], n_group=2, topk_group=1),
        [2, 3],
        [0.5, 0.5],
    ),
}


@pytest.mark.parametrize("function", [route, route_ref])
@pytest.mark.parametrize("case", CASES)
def test_hand_computed(case, function, device):
    logits, recipe, ids, weights = CASES[case]
    recipe = dict(recipe, top_k=len(ids))
    if "bias" in recipe:
        recipe["bias"] = torch.tensor(recipe["bias"], device=device)
    got_weights, got_ids = function(torch.tensor([logits], device=device), **recipe)
    assert got_ids.tolist() == [ids]
    torch.testing.assert_close(got_weights.cpu(), torch.tensor([weights]), rtol=0, atol=6e-5)
