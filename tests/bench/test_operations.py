"""The files of bench/: they run on any machine, check before they time, and write it all down."""

import json
import os
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from statistics import median

import pytest
import torch

from bench import conftest
from bench.dispatch_overhead import overheads
from tmoe.bench.records import PEER_OPERATIONS
from tmoe.bench.timing import ROUNDS, DeviceTimer, seconds_per_call

ROOT = Path(__file__).parents[2]


def run_benchmarks(*arguments):
    # A worker of xdist would tell pytest-benchmark through PYTEST_XDIST_WORKER not to measure.
    left_out = ("TRITON_INTERPRET", "PYTEST_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    environment["OMP_NUM_THREADS"] = "1"  # tiny layers, which threads only slow down
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What pytest-benchmark writes for every benchmark, at one tiny shape and two routings."""
    path = tmp_path_factory.mktemp("bench") / "results.json"
    done = run_benchmarks(
        *("bench", "--shapes=tiny", "--tokens=1", "--routing=random,zipf"),
        *("--backends=torch,torch_grouped_mm,sonicmoe", f"--benchmark-json={path}", "-rs"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if torch.cuda.is_available():
        return json.loads(path.read_text())
    assert "sonicmoe needs sonic-moe, which isn't installed" in done.stdout
    return json.loads(path.read_text())


def test_every_operation_is_measured_and_written_down(results):
    infos = [bench["extra_info"] for bench in results["benchmarks"]]
    operations = {path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")}
    assert {info["operation"] for info in infos} == operations and len(operations) >= 9
    for bench, info in zip(results["benchmarks"], infos, strict=True):
        assert (info["shape"], info["tokens"]) == ("tiny", 1)
        assert {"backend", "dtype", "device", "roof"} <= info.keys()
        assert {"torch", "python", "tmoe"} <= info["versions"].keys()
        assert info["us"] == pytest.approx(1e6 * bench["stats"]["median"]) and info["us"] > 0
        assert info["percent_of_floor"] == pytest.approx(100 * info["floor_us"] / info["us"])
        assert min(info["floor_us"], info["gbs"]) > 0 and info["tflops"] >= 0
        assert info["operation"] in bench["group"]
    machine = results["machine_info"]
    assert machine["matmul_tflops_at_start"] > 0 < machine["matmul_tflops_at_end"]
    assert machine["kernels_hash"] and {"device", "driver", "versions", "commit"} <= machine.keys()


def test_what_has_the_same_group_is_the_same_work(results):
    """Backends share a group, routings don't; a random one isn't named, as in older records."""
    groups = {}
    for bench in results["benchmarks"]:
        if bench["extra_info"]["operation"] == "layer":
            groups.setdefault(bench["group"], set()).add(bench["extra_info"]["backend"])
    backends = {"torch", "torch_grouped_mm"}
    assert groups == {"layer tiny T=1": backends, "layer zipf tiny T=1": backends}


def test_a_wrong_result_fails_and_is_not_timed(tmp_path):
    """A copy of a benchmark whose layer makes every result a hundredth larger."""
    source = (ROOT / "bench" / "bench_layer.py").read_text()
    wrong = """
from dataclasses import replace
def wrong(*args, **kwargs):
    case = experts_case(*args, **kwargs)
    return replace(case, call=lambda *inputs: 1.01 * case.call(*inputs))
"""
    assert source.count("        experts_case, ") == 1
    source = source.replace("        experts_case, ", "        wrong, ")
    source = source.replace("\n\nIMPL", wrong + "\n\nIMPL")
    (tmp_path / "bench_layer.py").write_text(source)
    done = run_benchmarks(
        *("-p", "bench.conftest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}"),
        *(str(tmp_path), "--shapes=tiny", "--tokens=1"),
        f"--benchmark-json={tmp_path / 'results.json'}",
    )
    assert done.returncode == 1 and "largest error" in done.stdout, done.stdout + done.stderr
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    "read, text, said",
    [
        (conftest._shapes, "mixtral", "mixtral is none of mixtral-8x7b,"),
        (conftest._tokens, "0", "must be numbers from 1 on"),
        (conftest._routings, "worst", "worst is none of random, balanced, zipf, one_expert"),
    ],
)
def test_a_wrong_option_is_refused(read, text, said):
    """By what reads it: `results` has all options from a command line."""
    with pytest.raises(ArgumentTypeError, match=said):
        read(text)


def test_recorded_operations_are_groups_that_exist(results):
    """What a benchmark calls its group, with another shape and number of tokens."""
    recorded = json.loads(PEER_OPERATIONS.read_text())
    kinds = {row["group"].rsplit(" ", 2)[0] for row in recorded["rows"]}
    assert {kind.split(" ")[0] for kind in kinds} == {"route", "sort", "quantize"}
    measured = {bench["group"].rsplit(" ", 2)[0] for bench in results["benchmarks"]}
    assert {kind for kind in kinds if kind.split(" ")[0] == "sort"} <= measured
    assert "route Renormalize" in kinds & measured


@pytest.mark.gpu
def test_device_timer_measures_one_call():
    """A round of three copies takes three times as long as one; a call is what counts."""
    timer = DeviceTimer()
    source = torch.zeros(2**28, device="cuda")
    target = source.clone()
    times = []
    for timer.calls in (1, 3):
        target.copy_(source)
        start = timer()
        for _ in range(timer.calls):
            target.copy_(source)
        times.append(timer() - start)
    assert times[1] == pytest.approx(times[0], rel=0.3)


@pytest.mark.gpu
def test_seconds_per_call_are_those_of_the_device():
    """A kernel over a GiB in a graph takes what it takes outside of one. (A copy doesn't: inside
    it goes through the copy engine.)"""
    source = torch.zeros(2**30, device="cuda", dtype=torch.uint8)
    target = source.clone()

    def call():
        return torch.add(source, 1, out=target)

    seconds = seconds_per_call([call] * 2, source.device)
    assert len(seconds) == ROUNDS and max(seconds) < 1.5 * min(seconds)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    events[0].record()
    for _ in range(10):
        call()
    events[1].record()
    events[1].synchronize()
    assert median(seconds) == pytest.approx(1e-4 * events[0].elapsed_time(events[1]), rel=0.2)


def test_dispatch_overhead_measures_what_it_says():
    found = [(scheme, held) for scheme, held, us in overheads(calls=10) if us > 0]
    assert found == [(s, h) for s in ("bf16", "nvfp4_a16") for h in (False, True)]
