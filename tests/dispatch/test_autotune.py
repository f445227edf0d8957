"""`tmoe.autotune`: what is timed and when, that the fastest runs, and that it is remembered."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.dispatch.conftest import forget
from tests.dispatch.tuning import pretend_times, problem
from tests.processes import python_path
from tests.reference import fused_experts_ref
from tmoe import environment, registry
from tmoe.dispatch import measure
from tmoe.dispatch.problem import Machine
from tmoe.dispatch.resolve import duration

E, K, H, I = 4, 2, 32, 16


pytestmark = pytest.mark.usefixtures("empty_store")


@pytest.fixture
def timed(monkeypatch):
    """Names of the backends that were timed; every run is run, and Triton is the fastest."""
    return pretend_times(monkeypatch, {"triton": 1.0}, 2.0)


def layer(device, tokens=5):
    dtype = torch.float32
    x = torch.randn(tokens, H, device=device, dtype=dtype)
    weights = torch.randn(E, 2 * I, H, device=device), torch.randn(E, H, I, device=device)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(max(tokens, 1))]).to(device)[:tokens]
    return x, *weights, torch.rand(tokens, K, device=device), ids


def ran(monkeypatch):
    """Names of the backends whose experts run from here on. One that can replay a call may do so
    instead of running them."""
    names = []
    for name, methods in (("torch", ["fused_experts"]), ("triton", ["fused_experts", "repeat"])):
        kind = type(registry.load(name))
        for method in methods:
            real = getattr(kind, method)

            def spy(self, *args, real=real, name=name, **kwargs):
                names.append(name)
                return real(self, *args, **kwargs)

            monkeypatch.setattr(kind, method, spy)
    return names


def test_the_fastest_runs_from_then_on(timed, monkeypatch, device):
    names, arguments = ran(monkeypatch), layer(device)
    before = tmoe.fused_experts(*arguments)
    usual = names[-1]
    with tmoe.autotune():
        y = tmoe.fused_experts(*arguments)
    assert sorted(timed) == ["torch", "triton"] and names[-1] == "triton"
    again = tmoe.fused_experts(*layer(device, tokens=7))  # of the same bucket of 8
    assert names[-1] == "triton" and usual in ("torch", "triton") and again.isfinite().all()
    truth, naive = (fused_experts_ref(*arguments, dtype=t) for t in (torch.float64, torch.float32))
    for result in (before, y):
        assert_matches(result, truth, naive)


def test_each_problem_is_timed_once_and_others_by_themselves(timed, device):
    with tmoe.autotune():
        for _ in range(3):
            tmoe.fused_experts(*layer(device))
        assert len(timed) == 2
        tmoe.fused_experts(*layer(device, tokens=20))
        assert len(timed) == 4
        tmoe.fused_experts(*layer(device), activation="geglu")
        assert len(timed) == 6


def test_what_is_not_timed(timed, device):
    """Nothing outside; no forced backend, no gradients, no empty call inside."""
    x, gate_up, *rest = layer(device)
    tmoe.fused_experts(x, gate_up, *rest)
    with tmoe.autotune():
        with tmoe.options(backend="torch"):
            tmoe.fused_experts(x, gate_up, *rest)
        tmoe.fused_experts(x, gate_up.clone().requires_grad_(), *rest)
        tmoe.fused_experts(*layer(device, tokens=0))
    tmoe.fused_experts(x, gate_up, *rest)
    assert timed == []


def test_every_operation_can_be_tuned(timed, device):
    logits = torch.randn(5, E, device=device)
    a, b = torch.randn(6, H, device=device), torch.randn(2, 8, H, device=device)
    offsets = torch.tensor([0, 4, 6], dtype=torch.int32, device=device)
    q = tmoe.quantize(b, "fp8_channel")
    with tmoe.autotune():
        tmoe.route(logits, tmoe.Routing(E, K, "Renormalize"))
        tmoe.grouped_gemm(a, b, offsets)
        tmoe.grouped_gemm(a, q, offsets, scheme="fp8_a16")
        tmoe.quantize(a, "mxfp8")
        tmoe.quantize(a, "nvfp4")  # the sizes of the one before, and a problem of its own
    assert len(timed) == 10


def test_again_measures_what_is_known_once_a_block(timed, device):
    for again, count in ((False, 2), (False, 2), (True, 4)):
        with tmoe.autotune(again=again):
            tmoe.fused_experts(*layer(device))
            tmoe.fused_experts(*layer(device))
        assert len(timed) == count


def test_progress_names_what_comes_next(timed, device):
    shown = []
    with tmoe.autotune(progress=lambda *step: shown.append(step)):
        tmoe.fused_experts(*layer(device))
    assert [name for name, _, _ in shown] == timed and [step[1:] for step in shown] == [
        (0, 2), (1, 2),
    ]  # fmt: skip


def test_the_clock_of_a_cpu_ticks_in_milliseconds(monkeypatch):
    now = iter(range(100))  # each look at the clock is a second later than the one before
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(now))
    calls = []
    assert measure._milliseconds(lambda: calls.append(1), "cpu") == 1000.0
    assert len(calls) == measure.WARM_UPS + measure.REPEATS


@pytest.mark.gpu
def test_the_clock_of_a_gpu_counts_its_work_not_the_launches():
    """Between launches the host sleeps ten times as long as the GPU works: others who share the GPU
    may make that work several times longer, but not nothing of it, nor as long as the host."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def slow_host():
        for _ in range(5):
            x @ x  # 0.14 TFLOP
            time.sleep(0.002)

    work, launches = (measure._milliseconds(slow_host, clock) for clock in ("cuda", "cpu"))
    fastest = 0.1  # ms: 6.9 PFLOP/s, more than any GPU does in bf16
    assert fastest < work < launches / 2


def test_a_backend_that_fails_has_no_time(monkeypatch, device):
    def fail(self, *args, **kwargs):
        raise RuntimeError("out of registers")

    with monkeypatch.context() as patch:
        patch.setattr(type(registry.load("triton")), "fused_experts", fail)
        names = ran(patch)
        with tmoe.autotune(), pytest.warns(UserWarning, match="triton failed on .* out of reg"):
            tmoe.fused_experts(*layer(device))
        assert names[-1] == "torch"


def test_explain_shows_the_times(timed, device):
    moe = tmoe.MoE(H, I, tmoe.Routing(E, K, "Renormalize")).to(device).requires_grad_(False)
    assert all(answer.timing is None for answer in tmoe.explain(moe, 5).candidates)
    with tmoe.autotune():
        moe(torch.randn(5, H, device=device))
    decision = tmoe.explain(moe, 5)
    assert decision.chosen == "triton"
    assert {c.name: c.timing for c in decision.candidates if c.accepted} == {
        "triton": 1.0, "torch": 2.0
    }  # fmt: skip
    assert "1.000 ms" in str(decision)
    assert duration(0.0413) == "41.3 us" and duration(12.5) == "12.500 ms"


def test_another_process_takes_what_this_one_measured(timed, empty_store, device):
    with tmoe.autotune():
        tmoe.fused_experts(*layer(device))
    (file,) = (empty_store / "times").glob("*.json")
    source = f"""
import torch, tmoe
from tmoe.dispatch.problem import Machine, Problem
machine = Machine.of("{device.type}")
problem = Problem("fused_experts", 5, {H}, {I}, {E}, {K}, torch.float32, machine,
                  activation=tmoe.Activation.swiglu())
decision = tmoe.explain(problem)
print(decision.chosen, {{c.name: c.timing for c in decision.candidates if c.accepted}})
"""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "triton {'triton': 1.0, 'torch': 2.0}"
    file.write_text("broken")
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True
    )
    assert "'triton': None" in done.stdout


def test_a_folder_for_one_block(timed, empty_store, tmp_path_factory, device):
    """Times go there, are found there, and aren't known elsewhere."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with tmoe.options(cache_dir=folder):
        with tmoe.autotune():
            tmoe.fused_experts(*layer(device))
        assert measure.known_times(problem(device))
    assert list((folder / "times").glob("*.json")) and not list(empty_store.rglob("*.json"))
    assert not measure.known_times(problem(device))
    forget()
    with tmoe.options(cache_dir=folder):
        assert measure.known_times(problem(device))


def test_times_belong_to_a_driver_and_to_sources(monkeypatch, device):
    """CG08"""
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue\nGCC version: 12.3.0"
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: text)
    assert environment.nvidia_driver() == "580.159.04"
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: "no number")
    assert environment.nvidia_driver() is None
    before = measure._measured_on(Machine.of(device))
    monkeypatch.setattr(measure, "kernels_hash", lambda: "another")
    assert measure._measured_on(Machine.of(device)).file_name != before.file_name


def test_files_are_read_once(monkeypatch, empty_store, device):
    """Those of tmoe; Triton reads its own whenever a kernel is new."""
    read = []
    for name in ("open", "read_text", "read_bytes"):
        real = getattr(Path, name)

        def spy(self, *args, real=real, **kwargs):
            read.append(self)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Path, name, spy)

    def found():
        folders = empty_store, Path("/proc"), Path(tmoe.__file__).parent
        return [path for path in read if any(path.is_relative_to(folder) for folder in folders)]

    tmoe.fused_experts(*layer(device))
    assert [path for path in found() if path.suffix == ".json"]  # the store's
    read.clear()
    tmoe.fused_experts(*layer(device))
    tmoe.fused_experts(*layer(device, tokens=40))  # a problem that was not asked about yet
    assert found() == []


def test_real_times_are_positive_and_kept(device, empty_store):
    with tmoe.autotune():
        tmoe.fused_experts(*layer(device))
    moe = tmoe.MoE(H, I, tmoe.Routing(E, K, "Renormalize")).to(device).requires_grad_(False)
    times = [c.timing for c in tmoe.explain(moe, 5).candidates if c.accepted]
    assert times == sorted(times) and times[0] > 0 and list((empty_store / "times").iterdir())


@pytest.mark.gpu
def test_a_capture_is_left_alone(timed, device):
    """CG01"""
    arguments = layer(device)
    tmoe.fused_experts(*arguments)
    with tmoe.autotune():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tmoe.fused_experts(*arguments)
    assert timed == []
