"""`tmoe bench` as people type it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tmoe.bench.run as running
from tests.bench.results import layer, results, write
from tmoe.bench import report as reporting
from tmoe.bench.cases import Case
from tmoe.bench.cost_model import fitted
from tmoe.bench.peers import PEERS
from tmoe.bench.shapes import ROUTINGS
from tmoe.cli import app
from tmoe.environment import kernels_hash

RECORDS = Path(__file__).parents[2] / "bench" / "results"
TINY = "E=4,K=2,H=64,I=32"


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def words(text):
    """Without the frames and line ends of an error."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


@pytest.fixture
def fast(monkeypatch):
    """Three rounds that took 1, 2 and 3 µs a call; no large matmul."""
    times = [2e-6, 1e-6, 3e-6]
    monkeypatch.setattr(running, "seconds_in_turn", lambda rounds, _: [times for _ in rounds])
    monkeypatch.setattr(running, "matmul_tflops", lambda *_: 500.0)


def test_it_measures_and_writes_everything(tmp_path):
    """For once with the clock."""
    done = invoke(
        *(TINY, "--tokens", "1,3", "--schemes", "bf16,fp8_block", "--routing", "balanced,zipf"),
        *("--backends", "torch,torch_grouped_mm,sonicmoe", "--out", tmp_path / "out"),
    )
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    infos = [bench["extra_info"] for bench in found["benchmarks"]]
    cells = {(i.get("scheme"), i["tokens"], i["routing"], i["backend"]) for i in infos}
    assert len(infos) == len(cells) == 2 * 2 * (2 + 1)
    for bench, info in zip(found["benchmarks"], infos, strict=True):
        stats = bench["stats"]
        assert len(stats["data"]) == stats["rounds"] == 10
        assert stats["min"] <= stats["median"] <= stats["max"]
        assert info["us"] == pytest.approx(1e6 * stats["median"]) and info["us"] > 0
        assert info["percent_of_floor"] == pytest.approx(100 * info["floor_us"] / info["us"])
        assert min(info["tflops"], info["gbs"]) > 0
    machine = found["machine_info"]
    assert machine["kernels_hash"] == kernels_hash() and "commit" in machine
    assert {"torch", "tmoe", "triton", "transformers"} <= machine["versions"].keys()
    assert machine["matmul_tflops_at_start"] > 0 < machine["matmul_tflops_at_end"]
    assert found["command"].startswith("tmoe") and not found["failed"]
    assert found["skipped"]["torch_grouped_mm, fp8_block"].endswith("in bf16, not in fp8_block")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "report.html"}
    assert "time per flop over that of balanced routing" in done.output
    assert "no pictures: they are of random routing" in done.output
    assert "sonicmoe needs sonic-moe, which isn't installed" in done.output


def test_pictures_are_of_random_routing(fast, tmp_path):
    done = invoke(TINY, "--tokens", "1,3", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"results.json", "report.html", "roofline.png", f"{TINY}.png"}
    again = invoke(
        "report", tmp_path / "results.json", "--backend", "torch", "--out", tmp_path / "b"
    )
    assert again.exit_code == 0, again.output
    assert {path.name for path in (tmp_path / "b").iterdir()} == names - {"results.json"}


def test_a_wrong_result_is_not_timed(fast, tmp_path, monkeypatch):
    right = Case.verify

    def verify(case):
        if case.tokens == 3:
            raise AssertionError("largest error 1, allowed 0")
        right(case)

    monkeypatch.setattr(Case, "verify", verify)
    done = invoke(TINY, "--tokens", "1,3", "--out", tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert done.exit_code == 1 and [b["extra_info"]["tokens"] for b in found["benchmarks"]] == [1]
    assert list(found["failed"].values()) == ["AssertionError: largest error 1, allowed 0"]
    assert "T=3 torch: AssertionError: largest error 1" in words(done.output)


def test_a_peer_that_breaks_stops_nobody_else(fast, tmp_path, monkeypatch):
    """Its library may have changed. What breaks in tmoe itself does stop."""

    def changed(gate_up_proj, down_proj, scheme):
        raise TypeError("unexpected keyword argument 'activation'")

    peer = PEERS["torch_grouped_mm"]
    monkeypatch.setitem(PEERS, peer.name, replace(peer, make=changed))
    arguments = (TINY, "--tokens", "1", "--out", tmp_path, "--backends")
    done = invoke(*arguments, "torch_grouped_mm,torch")
    found = json.loads((tmp_path / "results.json").read_text())
    assert done.exit_code == 1 and len(found["benchmarks"]) == 1
    assert "unexpected keyword argument 'activation'" in words(done.output)
    monkeypatch.setattr(Case, "verify", lambda case: changed(0, 0, 0))
    assert isinstance(invoke(*arguments, "torch").exception, TypeError)


def test_a_layer_that_does_not_fit_is_left_out(fast, tmp_path, monkeypatch):
    """The rest goes on, and what can't be quantised so is no reason to stop either."""
    make = running.random_weights

    def too_large(shape, *rest):
        if shape.num_experts == 8:
            raise torch.OutOfMemoryError("64 GiB")
        return make(shape, *rest)

    monkeypatch.setattr(running, "random_weights", too_large)
    shapes = ("E=8,K=2,H=64,I=32", "E=4,K=2,H=64,I=21")
    done = invoke(*shapes, "--tokens", "1", "--schemes", "bf16,mxfp4_a16", "--out", tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert done.exit_code == 1 and len(found["benchmarks"]) == 1
    kinds = {what: why.split(":")[0] for what, why in found["failed"].items()}
    assert kinds == {
        f"{shapes[0]} bf16": "OutOfMemoryError",
        f"{shapes[0]} mxfp4_a16": "OutOfMemoryError",
        f"{shapes[1]} mxfp4_a16": "ValueError",
    }


def test_what_is_measured_survives_an_interruption(fast, tmp_path, monkeypatch):
    def stop(case):
        if case.tokens == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Case, "verify", stop)
    done = invoke(TINY, "--tokens", "1,3", "--out", tmp_path)
    assert done.exit_code != 0
    path = tmp_path / "results.json"
    assert len(json.loads(path.read_text())["benchmarks"]) == 1
    assert invoke("report", path, "--backend", "torch").exit_code == 0
    assert invoke("compare", path, path).exit_code == 0


def test_without_matplotlib_there_is_still_a_file(fast, tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "NEEDED", ("no_such_package",))
    monkeypatch.setattr(reporting.why_no_pictures, "__defaults__", (reporting.NEEDED,))
    done = invoke(TINY, "--tokens", "1", "--out", tmp_path)
    assert done.exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    said = "no pictures and no page without no_such_package: pip install 'tmoe[bench]'"
    assert said in words(done.output)


def test_nothing_that_runs_is_no_success(fast, tmp_path):
    done = invoke(TINY, "--tokens", "1", "--backends", "sonicmoe", "--out", tmp_path / "out")
    assert done.exit_code == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("mixtral",), "SHAPES: mixtral is none of mixtral-8x7b,"),
        (("E=4,K=8,H=64,I=32",), "bench: K must be at most E = 4, got 8"),
        (("E=4,K=2,H=64",), "bench: SHAPES must be of the form E=8,"),
        ((TINY, "--tokens", "0"), "bench: --tokens must be positive numbers"),
        ((TINY, "--backends", "cuda"), "--backends: cuda is none of triton, torch,"),
        ((TINY, "--schemes", "int3"), "--schemes: int3 is none of bf16,"),
        ((TINY, "--routing", "worst"), "--routing: worst is none of random,"),
        (("predict", "mixtral-8x7b", "--scheme", "mxfp8"), "predict: scheme must be one of bf16"),
        (("predict", "mixtral-8x7b", "--ep", "3"), "predict: ep must be a divisor of 8, got 3"),
        ((TINY, "--out", __file__), "can't be written: File exists"),
        (("report", "nowhere.json", "--backend", "triton,torch"), "is none of triton, torch"),
        (("report", RECORDS / "h200_beside.json", "--out", __file__), "can't be written: File"),
        (("report", "nowhere.json"), "nowhere.json can't be read"),
        (("compare", "nowhere.json", "nowhere.json"), "nowhere.json can't be read"),
    ],
)
def test_a_wrong_word_is_refused(arguments, said):
    done = invoke(*arguments)
    assert done.exit_code == 2 and said in words(done.output)


def test_predict_is_a_word_and_an_option():
    word = invoke("predict", "mixtral-8x7b", "--tokens", "1,8192", "--scheme", "fp8_tensor")
    option = invoke("--predict", "mixtral-8x7b", "--tokens", "1,8192", "--schemes", "fp8_tensor")
    assert word.exit_code == option.exit_code == 0 and word.output == option.output
    assert "mixtral-8x7b, fp8_tensor, random routing, µs per call" in word.output
    assert "predicted time over that of the layer as it is" in word.output
    assert invoke("predict", TINY, "--tp", "2").exit_code == 0


def test_predict_takes_all():
    """As measuring does: of schemes, those that were recorded."""
    done = invoke("--predict", TINY, "--tokens", "1", "--schemes", "all", "--routing", "all")
    assert done.exit_code == 0, done.output
    titles = re.findall(r"(\w+), (\w+) routing, µs per call", done.output)
    assert titles == [(scheme, routing) for scheme in fitted() for routing in ROUTINGS]


def test_report_shows_a_recorded_file():
    done = invoke("report", RECORDS / "h200_beside.json", RECORDS / "h200_beside_fp8.json")
    assert done.exit_code == 0, done.output
    assert "routed experts, bfloat16, random routing" in done.output
    assert "routed experts, fp8_block, random routing" in done.output
    assert "a peer is faster in" in done.output
    operations = invoke("report", RECORDS / "h200_operations.json")
    assert "operations, µs per call" in operations.output


def test_report_says_when_there_is_nothing_to_show(tmp_path):
    path = write(tmp_path / "a.json", results(layer("tiny", 1, "torch", 1.0)))
    done = invoke("report", path, "--backend", "triton")
    assert done.exit_code == 2 and "no layer that the triton backend ran" in words(done.output)


def test_report_shows_the_backend_that_ran(tmp_path):
    """On a CPU that is torch; where both ran it is triton."""
    torch_ran, triton_ran = (
        layer("tiny", 1, name, us) for name, us in (("torch", 7.25), ("triton", 3.5))
    )
    cpu = write(tmp_path / "cpu.json", results(torch_ran))
    both = write(tmp_path / "both.json", results(torch_ran, triton_ran))
    assert "7.2" in invoke("report", cpu).output
    assert invoke("report", both).output == invoke("report", both, "--backend", "triton").output


def test_what_others_measured_is_refused(tmp_path):
    """Files of pytest-benchmark from another project."""
    bench = {"group": None, "name": "test_sort", "extra_info": {}, "stats": {"median": 1.0}}
    path = write(tmp_path / "a.json", {"machine_info": {"node": "x"}, "benchmarks": [bench]})
    for command in (("report", path), ("compare", path, path)):
        done = invoke(*command)
        assert done.exit_code == 2, done.exception
        assert "pytest-benchmark with tmoe's cases, got others" in words(done.output)


def test_compare_fails_only_if_asked_to(tmp_path):
    before = write(tmp_path / "a.json", results(layer("olmoe", 1, "triton", 100.0)))
    after = write(tmp_path / "b.json", results(layer("olmoe", 1, "triton", 110.0)))
    assert "1 slower, 0 faster, 0 the same" in invoke("compare", before, after).output
    codes = [
        invoke("compare", before, after, *more).exit_code
        for more in ((), ("--fail-above", 5), ("--fail-above", 15))
    ]
    assert codes == [0, 1, 0]
    other = write(tmp_path / "c.json", results(layer("olmoe", 2, "triton", 100.0)))
    done = invoke("compare", before, other)
    assert done.exit_code == 2 and "no cell in common" in words(done.output)


def test_a_gpu_is_not_asked_for(monkeypatch):
    """Predicting is for machines without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for a GPU"))
    assert invoke("predict", "olmoe").exit_code == 0
