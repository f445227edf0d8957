"""Every router class of transformers, before and after its class is exchanged for ours.

A replaced router answers with as many tensors of the same shapes and dtypes in the same order, in
fp32, in bf16 and under autocast; with the same experts wherever rounding can't change the choice;
and its gradients are the original's.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tmoe
from tests.integrations.counting import CountOps
from tests.routing.case import Case
from tests.routing.cases import CASES, HASH
from tests.routing.clear import ERROR_BF16, ERROR_FP32, clear_rows
from tests.routing.run import Routed
from tmoe.integrations.transformers.router_kinds import LEFT_ALONE, ROUTERS
from tmoe.integrations.transformers.version import before
from tmoe.routing import Routing

SWAPPED = [case for case in [*CASES, HASH] if case.router not in LEFT_ALONE]
CONFIGS = [
    pytest.param(case, changes, id=f"{case}-{i}")
    for case in SWAPPED
    for i, changes in enumerate(case.configs)
]
T = 12
Raw = list[Any]  # what the module returned, as a hook on it sees it


def test_every_router_of_the_table_is_compared():
    ours = {name for names in ROUTERS.values() for name in names}
    # before 5.21 Jamba's block selects: tests/integrations/test_families.py
    assert ours - {"JambaSparseMoeBlock"} == {case.router for case in SWAPPED}
    assert set(LEFT_ALONE) == {case.router for case in CASES} - ours


@contextmanager
def default_dtype(dtype: torch.dtype):
    """As a model in `dtype` is built: parameters that ask for fp32 stay in it."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def run(case: Case, router: nn.Module, bias: Tensor | None, columns: int) -> tuple[Routed, Raw]:
    """What the router makes of the same inputs each time."""
    raw: Raw = []
    handle = router.register_forward_hook(lambda module, args, out: raw.extend(out))
    torch.manual_seed(3)
    routed = case.run(router, torch.randn(T, columns), bias, case.logits_in_fp32)
    handle.remove()
    return routed, raw


def bias_for(case: Case, routing: Routing) -> Tensor | None:
    if not routing.takes_bias or case is HASH:
        return None
    torch.manual_seed(2)
    bias = torch.randn(routing.num_experts, dtype=torch.float32)
    return bias / routing.num_experts if routing.rule.score == "softmax" else bias


def meta(raw: Raw) -> list[tuple[Any, ...]]:
    return [(out.dtype, tuple(out.shape), out.is_contiguous()) for out in raw]


def by_id(routed: Routed) -> tuple[Tensor, Tensor]:
    ids, order = routed.ids.sort(-1)
    return routed.weights.gather(-1, order), ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case, changes", CONFIGS)
@torch.no_grad()
def test_same_answer(case, changes, dtype):
    if case.router.startswith("Inkling2") and dtype == torch.bfloat16 and before("5.24"):
        pytest.skip("transformers 5.23 can't run it in bf16 itself")
    with default_dtype(dtype):
        config = case.config(changes)
        router, routing = case.build(config), Routing.from_transformers(config)
        for name, buffer in router.named_buffers():
            if name.endswith("bias"):
                buffer.data = buffer.float()  # as every model has it, also in bf16
        bias, original = bias_for(case, routing), type(router)
        theirs, raw = run(case, router, bias, routing.num_logits)
        report = tmoe.replace_moe(router)
        assert report.routers == [""] and "" not in report.skipped
        assert type(router).__name__ == f"Tmoe{original.__name__}"
        with CountOps() as ops:
            ours, raw_ours = run(case, router, bias, routing.num_logits)
        assert sum(ops.calls[name] for name in ("route", "router")) == ops.calls.total() == 1

        assert meta(raw_ours) == meta(raw)
        assert (ours.weights.dtype, ours.ids.dtype) == (theirs.weights.dtype, theirs.ids.dtype)
        for mine, other in zip(raw_ours, raw, strict=True):
            if other.shape[-1] in (routing.num_experts, routing.num_logits):  # logits, or scores
                torch.testing.assert_close(mine, other)
        low = dtype == torch.bfloat16 and case.dtypes[1] == "model"
        error = ERROR_BF16 if low and routing.rule.score != "logit" else ERROR_FP32
        clear = clear_rows(theirs.logits, bias, routing, error)
        if case is HASH:
            clear[:] = True  # nothing is selected
        assert clear.any()
        # Before 5.23 some rounded a logarithm, exponential, sum, quotient and two factors to bf16.
        old = before("5.23") and theirs.weights.dtype == torch.bfloat16
        bound = {"rtol": 6 * ERROR_BF16, "atol": 0.0} if old else {}
        for mine, other in zip(by_id(ours), by_id(theirs), strict=True):
            torch.testing.assert_close(mine[clear], other[clear], **bound)

        report.restore()
        assert type(router) is original
        assert all(map(torch.equal, run(case, router, bias, routing.num_logits)[1], raw))


ONE_EACH = [pytest.param(case, id=str(case)) for case in SWAPPED]


@pytest.mark.parametrize("case", ONE_EACH)
def test_same_gradients_in_training(case):
    """Of the hidden states and all parameters, from logits and weights; with the same noise."""
    config = case.config(case.configs[0])
    router, routing = case.build(config).train(), Routing.from_transformers(config)
    bias = bias_for(case, routing)

    def gradients() -> dict[str, Tensor]:
        router.zero_grad()
        routed, raw = run(case, router, bias, routing.num_logits)
        torch.manual_seed(5)
        value = torch.randn(routing.num_logits)  # of an expert: some routers' order is open
        loss = (routed.weights * value[routed.ids]).sum()
        for out in raw:
            if out.shape[-1] in (routing.num_experts, routing.num_logits):  # logits, or scores
                loss = loss + (out * value[: out.shape[-1]]).sum()
        loss.backward()
        return {n: p.grad.clone() for n, p in router.named_parameters() if p.grad is not None}

    want = gradients()
    tmoe.replace_moe(router)
    got = gradients()
    assert got.keys() == want.keys() and want
    for name in want:
        torch.testing.assert_close(got[name], want[name])


@pytest.mark.parametrize("case", ONE_EACH)
@torch.no_grad()
def test_same_dtypes_under_autocast(case):
    """Of a model in fp32, as mixed-precision training has it."""
    config = case.config(case.configs[0])
    router, routing = case.build(config), Routing.from_transformers(config)
    bias = bias_for(case, routing)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, raw = run(case, router, bias, routing.num_logits)
        tmoe.replace_moe(router)
        ours, raw_ours = run(case, router, bias, routing.num_logits)
    assert meta(raw_ours) == meta(raw)
    assert (ours.weights.dtype, ours.ids.dtype) == (theirs.weights.dtype, theirs.ids.dtype)


BY_FORWARD = {kind.forward: name for names in ROUTERS.values() for name, kind in names.items()}
COMPILED = [case for case in SWAPPED if case.router in BY_FORWARD.values()]


@pytest.mark.parametrize("case", COMPILED, ids=str)
@torch.no_grad()
def test_compiles_without_graph_breaks(case):
    """One router of each kind; its routing is a constant of the graph."""
    config = case.config(case.configs[0])
    router, routing = case.build(config), Routing.from_transformers(config)
    bias = bias_for(case, routing)
    tmoe.replace_moe(router)
    _, want = run(case, router, bias, routing.num_logits)
    torch._dynamo.reset()
    method = router.tmoe_kind.method
    compiled = torch.compile(getattr(router, method), fullgraph=True, backend="aot_eager")
    setattr(router, method, compiled)
    routed, got = run(case, router, bias, routing.num_logits)
    assert torch.isfinite(routed.weights).all()
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other)
