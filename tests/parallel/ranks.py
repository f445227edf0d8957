"""Processes that are the ranks of a group: started once, given many functions to run.

On CPUs they talk through gloo, and are forked from a server that has imported torch, so they start
at once. On GPUs, one for each, they talk through NCCL. A function runs on all
ranks with the rank's number as first argument; results come back as a list.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

SECONDS = 60  # a group's time-out; nothing in these tests should come near


class RankError(AssertionError):
    """What a rank raised."""


class Ranks:
    def __init__(self, size: int, seconds: float = SECONDS, device: str = "cpu") -> None:
        context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
        if device == "cpu":
            context.set_forkserver_preload(["tests.parallel.ranks_main"])
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="tmoe-ranks-")
        store = os.path.join(self._folder.name, "store")
        self._pipes, self.processes = [], []
        from tests.parallel.ranks_main import serve

        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, store, timedelta(seconds=seconds), device)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
        """The results of ``function(rank, *args, **keywords)``; raises what a rank raised."""
        answers = self.answers(function, *args, **keywords)
        failed = [f"rank {r}: {error}" for r, (_, error) in enumerate(answers) if error]
        if failed:
            raise RankError("\n".join(failed))
        return [result for result, _ in answers]

    def answers(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
        """For each rank its result and its error, of which one is None. A rank that died has the
        error "died"."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((function, args, keywords))
        answers = []
        for pipe in self._pipes:
            try:
                answers.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                answers.append((None, "died"))
        return answers

    def errors(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[str | None]:
        """For each rank the last line of what it raised, "ValueError: ..." for example."""
        return [error for _, error in self.answers(function, *args, **keywords)]

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


@contextlib.contextmanager
def ranks(size: int, seconds: float = SECONDS, device: str = "cpu") -> Iterator[Ranks]:
    started = Ranks(size, seconds, device)
    try:
        yield started
    finally:
        started.close()


def words_of(error: BaseException) -> str:
    """An error with the end of its trace."""
    trace = "".join(traceback.format_exception(error)[-6:])
    return f"{type(error).__name__}: {error}\n{trace}"
