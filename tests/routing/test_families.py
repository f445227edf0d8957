"""Routing.from_transformers against the routers of transformers: the same experts and weights.

Every router module gets random weights and hidden states that make it see chosen logits: usual
ones, some that are 20 times larger, and some with a sum of sigmoids as small as an epsilon. Rows in
which a rounding could change the choice are left out (`clear.py`); they are few.

The ids have to be the module's, in its order where it has one. The truth for the weights is
`route_ref` in fp64 on the module's own fp32 logits. The module has to agree with it, relative to
each weight, to 8 ulp and, since exp(x) is as sensitive as x is large, another 2 ulp for each unit
of the row's largest logit. Our own error may be twice the module's, plus 4 ulp.
"""

from __future__ import annotations

import inspect
from functools import cache

import pytest
import torch

from tests.routing.case import PINNED
from tests.routing.cases import CASES, HASH
from tests.routing.clear import ERROR_BF16, clear_rows
from tests.routing.run import E
from tmoe.kernels import route as kernel
from tmoe.kernels.route import route, route_ref
from tmoe.routing import Routing

T = 5  # rows of each kind
CONFIGS = [
    pytest.param(case, changes, id=f"{case}-{i}")
    for case in CASES
    for i, changes in enumerate(case.configs)
]
FP32 = torch.finfo(torch.float32)


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
    """In the interpreter programs cost, not their rows."""
    monkeypatch.setattr(kernel, "_rows_and_warps", lambda *sizes, **options: (16, 1))


def logits_of_each_kind(columns):
    usual = torch.randn(T, columns)
    return [usual, 20 * torch.randn(T, columns), -40 - 10 * usual.abs()]


def biases(routing):
    if not routing.takes_bias:
        return [None]
    noise = torch.randn(routing.num_experts)
    noise[-1] = noise.max() + 0.5  # so that ZAYA's last one, which skips the layer, is selected
    like_scores = noise / routing.num_experts if routing.rule.score == "softmax" else noise
    return [like_scores, noise + 30, noise - 5]


def run(implementation, device, logits, **arguments):
    """Weights and ids of `route` or `route_ref` on the device, brought back."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to(device)
    weights, ids = implementation(logits.to(device), **arguments)
    return weights.cpu(), ids.cpu()


def by_id(weights, ids):
    ids, order = ids.long().sort(-1)
    return weights.gather(-1, order), ids


@cache
def has_order(router_class):
    """A source that says `sorted=False` leaves the order of the experts open."""
    return "sorted=False" not in inspect.getsource(router_class)


def errors(weights, truth):
    """In ulp: each row's largest error of a weight, relative to it."""
    error = (weights.double() - truth).abs() / truth.abs().clamp(min=FP32.tiny)
    return error.max(-1).values / FP32.eps


def assert_same(router, theirs, ours, truth, clear):
    """`ours` are weights and ids, `truth` the weights by id; the rows that are `clear` count."""
    weights, ids = ours
    if has_order(type(router)):
        assert torch.equal(ids[clear].long(), theirs.ids[clear])
    their_weights, their_ids = by_id(theirs.weights, theirs.ids)
    weights, ids = by_id(weights, ids)
    assert torch.equal(ids[clear], their_ids[clear])
    their_errors, our_errors = errors(their_weights, truth), errors(weights, truth)
    assert (their_errors <= 8 + 2 * theirs.logits.abs().max(-1).values)[clear].all()
    for rows in torch.arange(len(clear)).view(-1, T):  # of each kind of logits
        rows = rows[clear[rows]]
        if len(rows):
            assert our_errors[rows].max() <= 2 * their_errors[rows].max() + 4


@pytest.mark.parametrize("case, changes", CONFIGS)
@torch.no_grad()
def test_ids_and_weights(case, changes, device):
    config = case.config(changes)
    routing = Routing.from_transformers(config)
    router, arguments = case.build(config), dict(routing.kernel_arguments)
    wanted = torch.cat(logits_of_each_kind(routing.num_logits))
    if routing.rule.takes_expert_scale:
        arguments["expert_scale"] = router.per_expert_scale
    num_clear = 0
    for bias in biases(routing):
        theirs = case.run(router, wanted, bias, case.logits_in_fp32)
        logits = theirs.logits
        clear = clear_rows(logits, bias, routing)
        num_clear += clear.sum()
        canonical = case.run.canonical
        truth, true_ids = by_id(*canonical(*route_ref(logits.double(), bias=bias, **arguments)))
        for implementation in (route_ref, route):
            ours = canonical(*run(implementation, device, logits, bias=bias, **arguments))
            assert_same(router, theirs, ours, truth, clear)
            assert torch.equal(by_id(*ours)[1][clear], true_ids[clear])
    assert num_clear >= len(wanted) / 2


@pytest.mark.skipif(not PINNED, reason="the dtypes of the pinned transformers")
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_model_in_bf16(case, device):
    """The documented dtypes, and whose ids differ: only those of models that score in bf16.

    We compute in fp32 from the same bf16 logits, and so have the ids of fp64. A model that scores
    in bf16 has them only where the scores are further apart than its rounding.
    """
    torch.set_default_dtype(torch.bfloat16)
    try:
        config = case.config(case.configs[0])
        routing = Routing.from_transformers(config)
        router = case.build(config)
        wanted = torch.randn(3 * T, routing.num_logits)
        bias = biases(routing)[-1]
        bias = None if bias is None else bias.float()
        theirs = case.run(router, wanted, bias, case.logits_in_fp32)
    finally:
        torch.set_default_dtype(torch.float32)
    _logits, scores, weights = case.dtypes
    assert theirs.weights.dtype == (torch.float32 if weights == "fp32" else torch.bfloat16)
    arguments = dict(routing.kernel_arguments, bias=bias)
    true_ids = by_id(*case.run.canonical(*route_ref(theirs.logits.double(), **arguments)))[1]
    clear = clear_rows(theirs.logits, bias, routing)
    for implementation in (route_ref, route):
        ours = case.run.canonical(*run(implementation, device, theirs.logits, **arguments))
        ids = by_id(*ours)[1]
        assert torch.equal(ids[clear], true_ids[clear])
    if scores == "model" and routing.rule.score != "logit":
        clear = clear_rows(theirs.logits, bias, routing, ERROR_BF16)
    assert clear.any()
    assert torch.equal(by_id(theirs.weights, theirs.ids)[1][clear], true_ids[clear])


@torch.no_grad()
def test_hash_routing(device):
    """DeepSeek-V4's first layers look their experts up; `topk_ids` takes them."""
    case = HASH
    config = case.config({})
    router = case.build(config)
    theirs = case.run(router, torch.randn(T, E), None, False)
    arguments = Routing.from_transformers(config).kernel_arguments
    truth, _ = route_ref(theirs.logits.double(), topk_ids=theirs.ids, **arguments)
    for implementation in (route_ref, route):
        weights, ids = run(implementation, device, theirs.logits, topk_ids=theirs.ids, **arguments)
        assert torch.equal(ids.long(), theirs.ids)
        their_errors = errors(theirs.weights, truth)
        assert (their_errors <= 8 + 2 * theirs.logits.abs().max(-1).values).all()
        assert errors(weights, truth).max() <= 2 * their_errors.max() + 4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sum_of_zeros(case, device):
    """RT12: where a model divides 0 by 0, the weights are 0."""
    routing = Routing.from_transformers(case.config(case.configs[0]))
    logits = torch.full((1, routing.num_logits), -200.0)
    for implementation in (route_ref, route):
        weights, _ = run(implementation, device, logits, **routing.kernel_arguments)
        assert weights.isfinite().all()
