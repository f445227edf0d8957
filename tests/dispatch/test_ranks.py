"""Several ranks: whatever each has measured or knew, all choose the same backend and tiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tmoe.dispatch.ranks import agreed, slowest

ROOT = Path(__file__).parents[2]
A, B = ("cuda", "a layer"), ("cuda", "another")


def test_the_slowest_rank_counts():
    first, second = {"triton": 1.0, "torch": 2.0}, {"triton": 3.0, "torch": 1.0}
    assert slowest([{A: first}, {A: second}]) == {A: {"triton": 3.0, "torch": 2.0}}


def test_what_one_rank_could_not_run_none_takes():
    assert slowest([{A: {"x": 1.0, "y": 2.0}}, {A: {"y": 1.0}}]) == {A: {"y": 2.0}}
    assert slowest([{A: {"x": 1.0}}, {A: {"y": 1.0}}]) == {A: {}}


def test_a_rank_that_never_met_a_problem_has_no_say():
    times = {"x": 1.0, "y": 2.0}
    assert slowest([{A: times}, {}, {A: {}}, {B: times}]) == {A: times, B: times}


def test_a_process_alone_has_nobody_to_agree_with():
    assert agreed({A: {"x": 1.0}}) == {}


RANK = """
import json, sys, warnings
rank, folder, state = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import torch, torch.distributed as dist
import tmoe
from tmoe.dispatch import measure
from tmoe.dispatch.problem import Machine, Problem
from tmoe.dispatch.tuned import load_tuned, settings_key
from tmoe.backends import triton_backend
from tmoe.backends.triton_tiles import parse_tiles, tiles_name
from tmoe.library import operation

E, K, H, I = 4, 2, 32, 16
NAMES = ["16x16x32 w4 s2", "16x32x32 w4 s2", "16x16x64 w4 s2"]
# The two ranks disagree about both: rank 0 finds the torch backend and the first tiles fastest.
TILES = [dict(zip(NAMES, ms)) for ms in ([1, 4, 3], [9, 2, 3])][rank]
BACKENDS = [{"triton": 5.0, "torch": 4.0}, {"triton": 5.0, "torch": 6.0}][rank]
timed = []

def milliseconds(run, device_type):
    run()
    (backend,) = run.args
    tiles = backend._tiles.tuned.values() if backend.name == "triton" else []
    tuned = [tiles_name(tiles) for tiles in tiles]
    timed.append(tuned[0] if tuned else backend.name)
    if tuned and len(timed) <= 4:  # before the backends
        return TILES[tuned[0]]
    return BACKENDS[backend.name] if len(timed) > 4 or backend.name == "torch" else 20.0

measure._milliseconds = milliseconds
triton_backend.candidates = lambda *_: ([parse_tiles(name) for name in NAMES], [])
torch.manual_seed(0)
gate_up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)

def layer(tokens):
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)] or [torch.zeros(K).long()])
    return tmoe.fused_experts(
        torch.randn(tokens, H), gate_up, down, torch.rand(tokens, K), ids[:tokens]
    )

machine = Machine.of("cpu")

def problem(tokens):
    return Problem("fused_experts", tokens, H, I, E, K, torch.float32, machine,
                   activation=tmoe.Activation.swiglu())

if state in ("a store on rank 0", "no tiles asked for") and rank == 0:
    p = problem(8)
    tiles = {"plain, rows: table": 2.0, "plain, rows: " + NAMES[2]: 1.0}
    measure.keep(machine, settings_key(p, "triton"), tiles)
    measure.keep(machine, p.key, {"triton": 1.0, "torch": 2.0})

dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
tokens = {"other batches": [(5, 2), (2, 0)]}.get(state, [(5,), (5,)])[rank]
with tmoe.autotune(tiles=state != "no tiles asked for"):
    for count in tokens:
        layer(count)

def choices():
    return {T: [tmoe.explain(problem(T)).chosen, load_tuned("triton", problem(T)).settings,
                dict(measure.known_times(problem(T)))] for T in (8, 2)}

here = choices()
dist.all_gather_object = None  # nothing outside of the block may communicate
layer(5)
dist.barrier()
measure._times.cache_clear(); measure._store.cache_clear(); operation._choose.cache_clear()
print(json.dumps({"here": here, "next process": choices(), "timed": len(timed)}))
dist.destroy_process_group()
"""


def run_ranks(tmp_path, state, shared):
    """What each of two processes prints; `shared`: they have one home."""
    processes = []
    for rank in (0, 1):
        home = tmp_path / ("home" if shared else f"home {rank}")
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "TMOE_CACHE_DIR": str(home),
            "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, "-c", textwrap.dedent(RANK), str(rank), str(tmp_path), state]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.parametrize("shared", [False, True], ids=["homes", "one-home"])
def test_ranks_that_measure_different_times_choose_the_same(shared, tmp_path):
    first, second = run_ranks(tmp_path, "nothing known", shared)
    assert first["here"] == second["here"]
    assert first["next process"] == second["next process"] == first["here"]
    backend, tiles, times = first["here"]["8"]
    assert times == {"triton": 5.0, "torch": 6.0} and backend == "triton"  # the slowest ranks'
    assert "16x16x64" in tiles  # at most 3 ms on both; the others 9 and 4


def test_a_rank_with_a_store_and_one_without(tmp_path):
    first, second = run_ranks(tmp_path, "a store on rank 0", False)
    assert first["here"] == second["here"] == first["next process"] == second["next process"]
    assert first["timed"] == 0 < second["timed"]
    backend, tiles, times = first["here"]["8"]
    assert backend == "triton" and "16x16x64" in tiles and times == {"triton": 5.0, "torch": 6.0}


def test_tiles_of_one_ranks_store_are_agreed_on_too(tmp_path):
    """In a block that measures none."""
    first, second = run_ranks(tmp_path, "no tiles asked for", False)
    assert first["here"] == second["here"] == first["next process"] == second["next process"]
    assert "16x16x64" in first["here"]["8"][1]


def test_ranks_with_other_numbers_of_tokens(tmp_path):
    """No rank waits for one that has nothing to measure."""
    first, second = run_ranks(tmp_path, "other batches", False)
    assert first["here"] == second["here"] and first["here"]["8"][2] and first["here"]["2"][2]
