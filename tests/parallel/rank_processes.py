"""Run a function on several ranks of gloo, each a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 100  # until a rank that says nothing counts as hanging
LOST_SECONDS = 20  # until a collective gives up a rank


def _rank(function: Callable[[int], Any], rank: int, size: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=timedelta(seconds=LOST_SECONDS),
    )  # fmt: skip
    try:
        answer = True, function(rank)
    except BaseException:  # whatever it was, the test shows it
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))  # whole: a tensor's memory would end with this process
    pipe.close()
    os._exit(0)  # without waiting for ranks that are gone


def run_ranks(
    function: Callable[[int], Any], size: int, folder: Path, killed: tuple[int, ...] = ()
) -> list[Any]:
    """What `function(rank)` returned on each rank; None for those in `killed`, which must end
    without an answer. `function` is imported in the new processes, by name."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        arguments = (function, rank, size, str(folder / f"store-{function.__name__}"), there)
        process = context.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    answers: list[Any] = []
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(SECONDS), f"rank {rank} hangs"
            try:
                good, answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                assert rank in killed, f"rank {rank} ended without an answer"
                answers.append(None)
                continue
            assert good, f"rank {rank}:\n{answer}"
            answers.append(answer)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return answers
