"""The scripts that record on a GPU do here what they do there, on a tiny layer."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import tmoe.bench.run as running
from bench import record, startup
from bench.script import command_of, write_record
from tmoe.bench.records import read_results
from tmoe.bench.report import Report
from tmoe.bench.run import Selection
from tmoe.shapes import MoEShape

TINY = MoEShape("tiny", 4, 2, 64, 32)


@pytest.fixture
def plan(monkeypatch):
    """Four cells, of which the first is a peer that isn't there."""
    times = [1e-6, 2e-6, 3e-6]
    monkeypatch.setattr(running, "seconds_in_turn", lambda rounds, _: [times for _ in rounds])
    monkeypatch.setattr(running, "matmul_tflops", lambda *_: 500.0)
    routes, backends = ("balanced", "zipf"), ("sonicmoe", "torch")
    monkeypatch.setitem(
        record.PLANS, "routings", Selection([TINY], [2], ["bf16"], routes, backends)
    )


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        record.main([*arguments, "--plans", "routings"])
    return stopped.value.code


def test_a_plan_is_recorded(plan, tmp_path, capsys):
    assert run(str(tmp_path), "--commit", "abc") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "routings 1/4 tiny bf16 balanced T=2 sonicmoe: skipped"
    assert lines[1].startswith("routings 2/4 tiny bf16 balanced T=2 torch: 2.0 µs, ")
    found = read_results([tmp_path / "routings.json"])
    assert found["machine_info"]["matmul_tflops_at_end"] == 500
    assert found["machine_info"]["commit"] == "abc"
    *_, skew = Report(found, "torch").tables
    assert [row.texts for row in skew.rows] == [("tiny", "float32", "2", "2.0", "1.00")]


def test_the_time_limit_keeps_what_is_measured(plan, tmp_path, capsys):
    """Cells that are timed in turn are all kept."""
    assert run(str(tmp_path), "--seconds", "0") == 1
    assert "out of time" in capsys.readouterr().out
    (only,) = read_results([tmp_path / "routings.json"])["benchmarks"]
    assert only["extra_info"]["routing"] == "balanced"


def test_plans_are_of_layers_that_there_are():
    for plan in record.PLANS.values():
        assert len(plan) > 0 and len({shape.name for shape in plan.shapes}) == len(plan.shapes)
    assert {*record.OTHERS} & {shape.name for shape in record.GPU_SHAPES} == set()
    assert set(record.PLANS["routings"].routings) == {"balanced", "random", "zipf", "one_expert"}


def test_startup_measures_fresh_processes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "startup.json"
    arguments = ["startup", "--shape", "tiny", "--tokens", "1,4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    startup.main()
    found = json.loads(out.read_text())
    assert found["runs"]["cold"]["first_call_s"].keys() == {"1", "4"}
    assert 0 < found["import_s"] < 20  # that it was imported there, and not before
    assert found["cold_all_s"] >= found["cold_first_call_s"] > 0 < found["warm_first_call_s"]
    assert "wanted: below 60" in capsys.readouterr().out


def test_startup_says_what_went_wrong(tmp_path):
    with pytest.raises(RuntimeError, match="bench.startup --here .* failed:"):
        startup.in_a_fresh_process("no such shape", [1], tmp_path)


@pytest.mark.gpu
def test_a_decode_step_is_measured(tmp_path, monkeypatch):
    from bench import decode_step

    out = tmp_path / "decode.json"
    arguments = ["decode_step", "--layers", "1", "--tokens", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    decode_step.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["experts"] for row in rows] == ["grouped_mm", "batched_mm", "tmoe", "replace_moe"]
    assert all(row["tokens"] == 2 and 0 < row["graph_ms"] and 0 < row["eager_ms"] for row in rows)


def test_a_record_says_nothing_of_where_it_was_written(tmp_path, monkeypatch):
    out = tmp_path / "a record.json"
    monkeypatch.setattr(sys, "argv", ["host_time", "--tokens", "1 2", "--out", str(out)])
    command = command_of("python -m bench.host_time", out)
    write_record(out, torch.device("cpu"), command, tokens=1, rows=[{"us": 2.5}])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found.pop("machine_info")["kernels_hash"]
    assert found == {
        "command": "python -m bench.host_time --tokens '1 2'",
        "tokens": 1,
        "rows": [{"us": 2.5}],
    }
