"""Several ranks: whatever each has measured or knew, all choose the same backend and tiles."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from tmoe.dispatch.ranks import agreed, slowest

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


def _rank(pipe, home, *arguments):
    os.environ["TMOE_CACHE_DIR"] = str(home)
    from tests.dispatch.rank import main  # it changes settings, so not where the tests run

    pipe.send(main(*arguments))


def run_ranks(tmp_path, state, shared):
    """What each of two processes finds; `shared`: they have one home."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.dispatch.rank", __name__])
    pipes, processes = [], []
    for rank in (0, 1):
        home = tmp_path / ("home" if shared else f"home {rank}")
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(theirs, home, rank, tmp_path, state))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    found = [pipe.recv() if pipe.poll(120) else None for pipe in pipes]
    for process in processes:
        process.join(10)
    assert [process.exitcode for process in processes] == [0, 0]
    return found


@pytest.mark.parametrize("shared", [False, True], ids=["homes", "one-home"])
def test_ranks_that_measure_different_times_choose_the_same(shared, tmp_path):
    first, second = run_ranks(tmp_path, "nothing known", shared)
    assert first["here"] == second["here"]
    assert first["next process"] == second["next process"] == first["here"]
    backend, tiles, times = first["here"][8]
    assert times == {"triton": 5.0, "torch": 6.0} and backend == "triton"  # the slowest ranks'
    assert "16x16x64" in tiles  # at most 3 ms on both; the others 9 and 4


def test_a_rank_with_a_store_and_one_without(tmp_path):
    first, second = run_ranks(tmp_path, "a store on rank 0", False)
    assert first["here"] == second["here"] == first["next process"] == second["next process"]
    assert first["timed"] == 0 < second["timed"]
    backend, tiles, times = first["here"][8]
    assert backend == "triton" and "16x16x64" in tiles and times == {"triton": 5.0, "torch": 6.0}


def test_tiles_of_one_ranks_store_are_agreed_on_too(tmp_path):
    """In a block that measures none."""
    first, second = run_ranks(tmp_path, "no tiles asked for", False)
    assert first["here"] == second["here"] == first["next process"] == second["next process"]
    assert "16x16x64" in first["here"][8][1]


def test_ranks_with_other_numbers_of_tokens(tmp_path):
    """No rank waits for one that has nothing to measure."""
    first, second = run_ranks(tmp_path, "other batches", False)
    assert first["here"] == second["here"] and first["here"][8][2] and first["here"][2][2]
