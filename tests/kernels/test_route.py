"""The router kernel against its reference: the whole grid, and the inputs that broke others."""

from __future__ import annotations

import math

import pytest
import torch

from tests.checking import assert_matches
from tmoe.kernels.route import route, route_ref
from tmoe.routing import RULES, Routing, RoutingMethod

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EXPERTS = [1, 3, 5, 8, 60, 64, 128, 160, 256, 384]
METHODS = [method.name for method in RoutingMethod]
PLAIN = dict(weight="softmax")  # Renormalize
SIGMOID = dict(score="sigmoid", renormalize=True, epsilon=1e-20)  # DeepSeekV3
SOFTMAXES = [PLAIN, dict(score="softmax"), dict(score="softmax", renormalize=True)]
NAN, INF = math.nan, math.inf


def make_routing(method, E, K, grouped=False):
    rule, options = RULES[RoutingMethod[method]], {}
    if rule.takes_scaling_factor:
        options["scaling_factor"] = 2.5
    if rule.takes_groups and grouped:
        options |= dict(n_group=4, topk_group=2)
    return Routing(E, 1 if method == "Llama4" else K, method, **options)


def make_bias(routing, device):
    return torch.randn(routing.num_experts, device=device) if routing.takes_bias else None


def check(logits, bias=None, **recipe):
    """Same ids as the reference in fp32; weights as close to fp64 as the reference's."""
    weights, ids = route(logits, bias=bias, **recipe)
    naive, ids_ref = route_ref(logits, bias=bias, **recipe)
    truth, ids_truth = route_ref(logits.double(), bias=bias, **recipe)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert torch.equal(ids, ids_ref)
    assert torch.equal(ids, ids_truth), "scores too close for this test; change the input"
    assert_matches(weights, truth, naive)
    return weights, ids


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_dtype(method, dtype, device):
    for E, K, grouped in ((8, 2, False), (60, 6, False), (64, 6, True), (20, 3, True)):
        routing = make_routing(method, E, K, grouped)
        logits = torch.randn(5, E, device=device).to(dtype)
        check(logits, make_bias(routing, device), **routing.kernel_arguments)


@pytest.mark.parametrize("E", EXPERTS)
def test_every_number_of_experts_and_slots(E, device):
    """RT06, RT08, RT22: no size is special, a power of two or not."""
    logits = torch.randn(3, E, device=device)
    bias = torch.randn(E, device=device)
    for K in (1, 2, 3, 4, 6, 7, 8, 10):
        if K <= E:
            check(logits, top_k=K, **PLAIN)
            check(logits, bias, top_k=K, **SIGMOID)


@pytest.mark.parametrize("E, K", [(512, 10), (512, 22), (2048, 32), (128, 33), (896, 6), (200, 64)])
def test_many_experts_and_slots(E, K, device):
    """RT09: nothing is sized for 8 slots or 512 experts."""
    check(torch.randn(2, E, device=device), top_k=K, **PLAIN)


def test_all_experts_selected(device):
    weights, ids = check(torch.randn(3, 7, device=device), top_k=7, **PLAIN)
    assert torch.equal(ids.sort().values, torch.arange(7, device=device).int().expand(3, 7))
    assert_matches(weights.sum(-1), torch.ones(3, device=device), torch.ones(3, device=device))


@pytest.mark.parametrize("E", [3, 5, 60, 160])
def test_lanes_without_an_expert_are_never_selected(E, device):
    """RT06: a filler of 0 would beat real logits that are all negative."""
    logits = torch.full((17, E), -50.0, device=device)
    bias = torch.full((E,), -3.0, device=device)
    for recipe in (PLAIN, dict(score="softmax"), SIGMOID | dict(bias=bias)):
        _, ids = route(logits, top_k=2, **recipe)
        assert torch.equal(ids.cpu(), torch.tensor([[0, 1]]).int().expand(17, 2))


def test_ties_go_to_the_lower_index(device):
    """RT15: everywhere, at the boundary of k, and between groups; every time the same."""
    zeros = torch.zeros(1, 384, device=device)
    for recipe in (PLAIN, SIGMOID, SIGMOID | dict(n_group=6, topk_group=3)):
        for _ in range(3):
            assert route(zeros, top_k=8, **recipe)[1].tolist() == [list(range(8))]
    boundary = torch.tensor([[1.0, 5, 3, 3, 3, 4]], device=device)
    assert route(boundary, top_k=3, **PLAIN)[1].tolist() == [[1, 5, 2]]
    coarse = torch.randint(-2, 3, (8, 60), device=device).float()
    for recipe in (PLAIN, SIGMOID, SIGMOID | dict(n_group=5, topk_group=2)):
        check(coarse, top_k=6, **recipe)


def test_close_scores_are_not_a_tie(device):
    """RT16: subtracting a multiple of the index would put expert 0 first."""
    bias = torch.zeros(256, device=device)
    bias[0], bias[200] = 0.50000, 0.50003
    _, ids = route(torch.zeros(1, 256, device=device), bias=bias, top_k=1, **SIGMOID)
    assert ids.tolist() == [[200]]


@pytest.mark.parametrize("E", [256, 384])
@pytest.mark.parametrize("K", [1, 3, 7, 8])
def test_one_group_is_no_group(E, K, device):
    """RT05."""
    logits, bias = torch.randn(2, E, device=device), torch.randn(E, device=device)
    check(logits, bias, top_k=K, n_group=1, topk_group=1, **SIGMOID)


@pytest.mark.parametrize(
    "E, n_group, topk_group, K",
    [(256, 8, 4, 8), (160, 8, 3, 6), (60, 5, 2, 7), (72, 3, 1, 24), (8, 4, 4, 3), (6, 6, 2, 2)],
)
def test_groups(E, n_group, topk_group, K, device):
    logits, bias = torch.randn(4, E, device=device), torch.randn(E, device=device) - 2
    recipe = dict(top_k=K, n_group=n_group, topk_group=topk_group, **SIGMOID)
    _, ids = check(logits, bias, **recipe)
    for row in (ids // (E // n_group)).tolist():
        assert len(set(row)) <= topk_group


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_not_finite(method, dtype, device):
    """RT10: a NaN stays in its row and counts as -inf; ids are distinct and in range."""
    E = 12
    logits = torch.randn(8, E).to(dtype)
    clean = logits[0].clone()
    logits[1] = NAN
    logits[2] = -INF
    logits[3] = INF
    logits[4, ::2] = NAN
    logits[5, :3] = INF
    logits[6] = torch.where(torch.arange(E) % 3 == 0, -INF, INF)
    logits[7, 1:] = -INF
    routing = make_routing(method, E, 4, grouped=True)
    bias = make_bias(routing, device)
    logits = logits.to(device)
    weights, ids = check(logits, bias, **routing.kernel_arguments)
    assert weights.isfinite().all()
    assert (weights[[1, 2, 3, 6]] == 0).all(), "no finite logit"
    for row in ids.tolist():
        assert len(set(row)) == len(row) and 0 <= min(row) and max(row) < E
    as_minus_inf = torch.where(logits.isnan(), -INF, logits)
    assert torch.equal(route(as_minus_inf, bias=bias, **routing.kernel_arguments)[0], weights)
    alone = route(clean.to(device)[None], bias=bias, **routing.kernel_arguments)
    assert torch.equal(alone[0], weights[:1]) and torch.equal(alone[1], ids[:1])


def test_an_infinite_logit_takes_all(device):
    logits = torch.tensor([[1.0, INF, 2.0, 0.0], [INF, 1.0, 0.0, INF]], device=device)
    for recipe in SOFTMAXES:
        weights, ids = route(logits, top_k=2, **recipe)
        assert ids[:, 0].tolist() == [1, 0] and ids[1, 1] == 3
        assert weights.tolist() == [[1.0, 0.0], [0.5, 0.5]]


def test_large_logits_do_not_overflow(device):
    logits = torch.tensor([[3e38, -3e38, 1e4, 0.0, -1e4]], device=device)
    for method in METHODS:
        routing = make_routing(method, 5, 3)
        weights, _ = check(logits, **routing.kernel_arguments)
        assert weights.isfinite().all()


def test_any_strides(device):
    """Columns, expanded rows, a stretch of a wider tensor: nothing is assumed about the input."""
    wide = torch.randn(40, 60, device=device)
    before = wide.clone()
    views = [wide.t()[:8, :20], wide[::3, ::2], wide[:1, 5:25].expand(6, 20), wide[2:3, 7:]]
    for view in views:
        got = route(view, top_k=4, **PLAIN)
        want = route(view.contiguous(), top_k=4, **PLAIN)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    bias = torch.randn(60, 2, device=device)[:, 1]
    check(wide[:3], bias, top_k=4, **SIGMOID)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_dtypes(dtype, device):
    bias = torch.randn(24, device=device).to(dtype)
    check(torch.randn(3, 24, device=device), bias, top_k=3, **SIGMOID)


def test_no_tokens(device):
    weights, ids = route(torch.randn(0, 8, device=device), top_k=2, **PLAIN)
    assert weights.shape == ids.shape == (0, 2)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32


@pytest.mark.parametrize("E", [5, 60, 128])
def test_a_row_does_not_depend_on_its_batch(E, device):
    """DT01: also not on the alignment of its memory or on a stride that a batch of one may have."""
    logits = torch.randn(33, E, device=device).to(torch.bfloat16)
    for recipe in (PLAIN, dict(score="softmax"), SIGMOID):
        weights, ids = route(logits, top_k=4, **recipe)
        for t in (0, 7, 32):
            shifted = torch.randn(E + 1, device=device).to(torch.bfloat16)
            shifted[1:] = logits[t]
            rows = (logits[t : t + 1], logits[t : t + 2], shifted.as_strided((1, E), (1, 1), 1))
            for row in rows:
                alone = route(row, top_k=4, **recipe)
                assert torch.equal(alone[0][0], weights[t]) and torch.equal(alone[1][0], ids[t])


@pytest.mark.parametrize("recipe", SOFTMAXES, ids=str)
def test_reference_gradient(recipe):
    """The reference is what trains: its gradient is that of the formula, ties included."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    logits += torch.tensor([0.3, 0.2, 0.1, 0.0])
    recipe = recipe | dict(top_k=2)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: route_ref(x, **recipe)[0], logits)
    dead = torch.tensor([[NAN, -INF, NAN], [INF, NAN, 1.0]], requires_grad=True)
    route_ref(dead, **recipe)[0].sum().backward()
    assert dead.grad.isfinite().all()
