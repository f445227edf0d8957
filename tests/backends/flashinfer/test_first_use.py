"""FlashInfer's single operations are compared with Triton's before they are used."""

from __future__ import annotations

import re
import sys
import warnings

import pytest
import torch

import tmoe
from tests.backends.flashinfer.operating import (
    faults_of,
    flashinfer,
    gemm_problem,
    machine,
    quantize_problem,
    route_problem,
)
from tmoe.dispatch import first_use, measure
from tmoe.dispatch.problem import Machine
from tmoe.library import operation
from tmoe.routing import Routing

CPU = torch.device("cpu")
SMALL = Routing(32, 4, "DeepSeekV3", n_group=4, topk_group=2, scaling_factor=2.5)
PROBLEMS = {
    "route": lambda: route_problem(routing=SMALL),
    "mxfp8": lambda: quantize_problem(),
    "mxfp4": lambda: quantize_problem(format="mxfp4", rule="ceil"),
    "fp8_block": lambda: gemm_problem(),
    "mxfp4_a8": lambda: gemm_problem(scheme="mxfp4_a8"),
}


@pytest.fixture(autouse=True)
def on_a_b200(monkeypatch):
    monkeypatch.setattr(Machine, "of", classmethod(lambda cls, device: machine()))


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_agrees_is_used_and_compared_once(name):
    problem = PROBLEMS[name]()
    with flashinfer() as calls, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        answer = {a.name: a for a in tmoe.explain(problem).candidates}["flashinfer"]
        assert answer.accepted and "to be compared with Triton" in answer.reason and not calls
        assert first_use.may_use("flashinfer", problem, CPU)
        num_calls = len(calls)
        assert first_use.may_use("flashinfer", problem, CPU) and len(calls) == num_calls >= 1
        answer = {a.name: a for a in tmoe.explain(problem).candidates}["flashinfer"]
        assert answer.accepted and "agrees with Triton" in answer.reason


FAULTS = [
    ("route", "ties_to_the_higher", "tokens get other experts"),
    ("route", "factor_twice", "a weight is 1.5 of itself away"),
    ("route", "fast_tanh", "tokens get other experts|of itself away"),
    ("route", "sigmoid_by_tanh", "tokens get other experts|of itself away"),
    ("route", "raises", "it failed when it was compared: fused_topk_deepseek: no nvcc"),
    ("mxfp8", "nan_is_largest", "in 4 of 40 rows aren't Triton's"),
    ("mxfp8", "nan_spares_the_block", "in 4 of 40 rows aren't Triton's"),
    ("mxfp8", "tiny_blocks_are_0", "codes in . of 40 rows aren't Triton's"),
    ("mxfp8", "half_up", "codes in .* of 40 rows aren't Triton's"),
    ("mxfp4", "nan_spares_the_block", "rows aren't Triton's"),
    ("mxfp4", "half_up", "codes in .* of 40 rows aren't Triton's"),
    ("mxfp4", "raises", "it failed when it was compared"),
    ("fp8_block", "next_rows_scale", "of a row away from Triton's"),
    ("fp8_block", "groups_swapped", "of a row away from Triton's"),
    ("fp8_block", "rows_lost", "its result is inf of a row away"),
    ("fp8_block", "raises", "it failed when it was compared"),
    ("mxfp4_a8", "next_rows_scale", "of a row away from Triton's"),
    ("mxfp4_a8", "rows_lost", "its result is inf of a row away"),
]


@pytest.mark.parametrize(("name", "fault", "said"), FAULTS)
def test_what_differs_is_refused_with_a_warning_once(name, fault, said):
    problem = PROBLEMS[name]()
    with flashinfer(faults=[fault]):
        with pytest.warns(UserWarning, match=f"flashinfer isn't used for {problem.op}.*({said})"):
            assert not first_use.may_use("flashinfer", problem, CPU)
        answer = {a.name: a for a in tmoe.explain(problem).candidates}["flashinfer"]
        assert not answer.accepted and re.search(said, answer.reason)
        assert tmoe.explain(problem).chosen == "triton"
        with tmoe.options(verify=False):  # the user's own risk
            answer = {a.name: a for a in tmoe.explain(problem).candidates}["flashinfer"]
            assert answer.accepted and "not compared" in answer.reason


@pytest.mark.parametrize("name", ["route", "mxfp8", "mxfp4"])
def test_what_is_known_of_0_7_4_does_not_pass(name):
    """Its sigmoid, and what its quantisers make of NaN, aren't tmoe's."""
    with flashinfer(faults=faults_of("0.7.4")), pytest.warns(UserWarning, match="isn't used"):
        assert not first_use.may_use("flashinfer", PROBLEMS[name](), CPU)


def test_a_function_that_is_missing_is_a_reason():
    with flashinfer():
        del sys.modules["flashinfer.fused_moe"].fused_topk_deepseek
        with pytest.warns(UserWarning, match="the installed FlashInfer has no fused_topk_deepseek"):
            assert not first_use.may_use("flashinfer", PROBLEMS["route"](), CPU)


# through the operations ---------------------------------------------------------------------------


def routed(**options):
    logits, bias = torch.randn(5, 32), torch.randn(32)
    with tmoe.options(**options):
        return logits, bias, tmoe.route(logits, SMALL, bias=bias)


def test_a_forced_backend_runs_after_it_was_compared():
    with flashinfer() as calls:
        logits, bias, (weights, ids) = routed(backend="flashinfer")
        num_calls = len(calls)
        assert num_calls > 1 and calls[-1][1]["topk_values"].data_ptr() == weights.data_ptr()
        routed(backend="flashinfer")
        assert len(calls) == num_calls + 1
    wanted = tmoe.route(logits, SMALL, bias=bias)
    assert torch.equal(ids, wanted[1])
    torch.testing.assert_close(weights, wanted[0])


def test_verify_false_skips_the_comparison():
    with flashinfer(faults=["factor_twice"]) as calls:
        routed(backend="flashinfer", verify=False)
        assert len(calls) == 1


def test_a_forced_backend_that_differs_raises_its_reason():
    with flashinfer(faults=["ties_to_the_higher"]):
        with pytest.warns(UserWarning), pytest.raises(tmoe.NoBackendError, match="other experts"):
            routed(backend="flashinfer")
        with pytest.raises(tmoe.NoBackendError, match="other experts"):
            routed(backend="flashinfer")


def test_what_a_route_cannot_return_is_refused():
    logits = torch.randn(5, 32)
    with flashinfer() as calls, tmoe.options(backend="flashinfer"):
        for more in ({"return_probs": True}, {"return_counts": True},
                     {"topk_ids": torch.zeros(5, 4, dtype=torch.int32)}):  # fmt: skip
            with pytest.raises(tmoe.NoBackendError, match="knows nothing of"):
                tmoe.route(logits, SMALL, **more)
        assert not calls


@pytest.fixture
def fastest(monkeypatch, tmp_path):
    """FlashInfer was measured to be faster."""
    monkeypatch.setattr(operation, "known_times", lambda problem: {"flashinfer": 1, "triton": 2})


def test_the_fastest_is_compared_and_falls_back(fastest):
    with flashinfer() as calls:
        routed()
        assert calls
    with flashinfer(faults=["raises"]) as calls:
        with pytest.warns(UserWarning, match="no nvcc"):
            logits, bias, (weights, ids) = routed()
        routed()
        assert len(calls) == 1
        assert torch.equal(ids, tmoe.route(logits, SMALL, bias=bias)[1])


def test_nothing_is_compared_or_remembered_while_a_graph_is_captured(fastest, monkeypatch):
    with flashinfer() as calls:
        with monkeypatch.context() as capture:
            capture.setattr(first_use, "_is_captured", lambda device: True)
            routed()
            with pytest.raises(tmoe.NoBackendError, match="run route.* once before that"):
                routed(backend="flashinfer")
            assert not calls
        routed()
        assert len(calls) > 1
        num_calls = len(calls)
        with monkeypatch.context() as capture:
            capture.setattr(first_use, "_is_captured", lambda device: True)
            routed()
        assert len(calls) == num_calls + 1


def test_autotune_times_what_agrees(monkeypatch):
    names = []

    def milliseconds(run, device_type):
        names.append(run.args[0].name)
        return 1.0

    monkeypatch.setattr(measure, "_milliseconds", milliseconds)
    with flashinfer(), tmoe.autotune(again=True):
        routed()
    assert names[:2] == ["triton", "flashinfer"]
    names.clear()
    with flashinfer(faults=["raises"]), tmoe.autotune(again=True), pytest.warns(UserWarning):
        routed()
    assert "flashinfer" not in names and "triton" in names
    measure._times.cache_clear()
