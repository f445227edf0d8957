"""The dispatcher as pure functions: any machine can be asked about from here."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tmoe import registry
from tmoe.dispatch.problem import Machine, Problem, token_bucket
from tmoe.dispatch.ranking import RANKING, ranking
from tmoe.dispatch.resolve import candidates, resolve
from tmoe.routing import Routing

H200 = Machine("cuda", "NVIDIA H200", (9, 0), triton_version="3.6.0")
MI300 = Machine("cuda", "AMD Instinct MI300X", (9, 4), triton_version="3.6.0")
LAPTOP = Machine("cpu", "cpu", triton_version="3.7.1")


def problem(**changes) -> Problem:
    fields = dict(
        op="fused_experts", tokens=64, hidden=2048, intermediate=768, num_experts=128, top_k=8,
        dtype=torch.bfloat16, machine=H200,
    )  # fmt: skip
    return Problem(**fields | changes)


class Fake:
    def __init__(self, reason=None):
        self.reason = reason

    def why_not(self, problem):
        return self.reason


def test_the_ranking_decides_between_those_that_can():
    backends = {"torch": Fake(), "triton": Fake()}
    assert resolve(problem(), backends=backends).chosen == "triton"
    assert resolve(problem(machine=MI300), backends=backends).chosen == "triton"
    assert resolve(problem(machine=LAPTOP), backends=backends).chosen == "torch"
    assert resolve(problem(machine=Machine("xpu")), backends=backends).chosen == "torch"


def test_a_refusal_passes_on_to_the_next():
    backends = {"torch": Fake(), "triton": Fake("no backward yet")}
    decision = resolve(problem(needs_grad=True), backends=backends)
    assert decision.chosen == "torch"
    triton, torch_ = decision.candidates
    assert (triton.name, triton.accepted, triton.reason) == ("triton", False, "no backward yet")
    assert (torch_.name, torch_.accepted, torch_.timing) == ("torch", True, None)
    assert torch_.reason == ranking(H200)["torch"]


def test_nobody_can_and_the_error_lists_every_reason():
    backends = {"torch": Fake("I must be even, got 7"), "triton": Fake("needs 8.0, got 7.5")}
    with pytest.raises(tmoe.NoBackendError) as caught:
        resolve(problem(), backends=backends)
    message = str(caught.value)
    assert message.startswith("no backend can run fused_experts(T<=64, H=2048, I=768, E=128, K=8, ")
    assert "NVIDIA H200\n  triton: needs 8.0, got 7.5\n  torch: I must be even, got 7" in message


def test_a_forced_backend_is_taken_or_refuses():
    backends = {"torch": Fake(), "triton": Fake("needs 8.0, got 7.5")}
    assert resolve(problem(), "torch", backends).chosen == "torch"
    with pytest.raises(tmoe.NoBackendError, match="backend 'triton' was asked for .*: needs 8.0"):
        resolve(problem(), "triton", backends)
    with pytest.raises(ValueError, match="backend must be one of torch, triton, got 'cuda'"):
        resolve(problem(), "cuda", backends)


def test_a_backend_that_is_not_ranked_comes_last():
    answers = candidates(problem(), {"mine": Fake(), "torch": Fake(), "triton": Fake()})
    assert [answer.name for answer in answers] == ["triton", "torch", "mine"]
    assert "not ranked" in answers[-1].reason


def test_a_backend_that_cannot_be_imported_is_a_reason(monkeypatch):
    monkeypatch.setitem(registry._targets, "broken", "tmoe.no_such_module:Backend")
    answer = candidates(problem())[-1]
    assert (answer.name, answer.accepted) == ("broken", False)
    assert answer.reason == "can't be imported: No module named 'tmoe.no_such_module'"


def test_a_name_stands_for_one_backend():
    registry.register("torch", "tmoe.backends.torch_backend:TorchBackend")
    with pytest.raises(ValueError, match="backend 'torch' is already tmoe.backends.torch_backend"):
        registry.register("torch", "elsewhere:Backend")
    assert registry.names()[:2] == ("torch", "triton")
    assert registry.load("torch") is registry.load("torch")


def test_every_ranked_name_exists_and_has_a_reason():
    for row in RANKING:
        assert {name for name, _ in row.order} <= set(registry.names())
        assert all(len(reason) > 10 for _, reason in row.order)


def test_the_torch_backend_refuses_batch_invariance_of_its_matmuls():
    torch_backend = registry.load("torch")
    assert "number of rows" in torch_backend.why_not(problem(batch_invariant=True))
    assert torch_backend.why_not(problem(op="route", batch_invariant=True)) is None
    assert torch_backend.why_not(problem(deterministic=True, needs_grad=True)) is None
    assert torch_backend.why_not(problem(op="quantize", batch_invariant=True)) is None


def test_who_trains_on_quantised_weights():
    triton = registry.load("triton")
    known = {"dtype": torch.bfloat16, "scheme": "fp8_block", "needs_grad": True}
    for more in ({}, {"has_lora": True}, {"op": "grouped_gemm"}):
        reason = triton.why_not(problem(**known | more))
        assert reason is None or "needs a GPU" in reason
    assert registry.load("torch").why_not(problem(**known, op="grouped_gemm")) is None


def test_gradients_take_a_backend_that_has_them_and_say_so():
    decision = resolve(problem(needs_grad=True))
    assert decision.chosen == "triton"
    assert "forward and backward" in decision.candidates[0].reason
    routing = {"op": "route", "routing": Routing(8, 2, "Default")}
    assert resolve(problem(needs_grad=True, **routing)).chosen == "triton"
    assert resolve(problem(needs_grad=True, dtype=torch.float64)).chosen == "torch"


@pytest.mark.parametrize("tokens, bucket", [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_tokens_are_bucketed_by_powers_of_two(tokens, bucket):
    assert token_bucket(tokens) == bucket


def test_a_machine_is_described_once():
    assert Machine.of("cpu") is Machine.of(torch.device("cpu"))
    machine = Machine.of("cpu")
    assert (machine.device_type, machine.capability) == ("cpu", None)
    assert machine.torch_version == torch.__version__


def test_problems_are_hashable_and_print_in_one_line():
    gemm = problem(op="grouped_gemm", top_k=1, machine=LAPTOP, has_bias=True)
    assert str(gemm) == "grouped_gemm(T<=64, D=2048, N=768, E=128, K=1, bfloat16, has bias) on cpu"
    assert hash(gemm) == hash(problem(op="grouped_gemm", top_k=1, machine=LAPTOP, has_bias=True))
    routing = problem(op="route", hidden=0, intermediate=0, routing=Routing(128, 8, "Default"))
    assert str(routing) == "route(T<=64, E=128, K=8, bfloat16, Default) on NVIDIA H200"
