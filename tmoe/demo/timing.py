"""Time calls: wall clock on a CPU, the replay of one CUDA graph on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

Call = Callable[[], object]


def median_ms(calls: Sequence[Call], device: torch.device, repeats: int = 20) -> float:
    """Milliseconds per call: the median over `repeats` rounds through all of `calls`.

    Several calls on different inputs keep one round from being served by what the last one left in
    a cache. On a GPU a round is one CUDA graph, so Python's launch time doesn't count.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            rounds = _graph_rounds(calls, repeats)
    else:
        rounds = _wall_rounds(calls, repeats)
    return median(rounds) / len(calls)


def _wall_rounds(calls: Sequence[Call], repeats: int) -> list[float]:
    run_all(calls)  # warm-up
    rounds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run_all(calls)
        rounds.append(1e3 * (time.perf_counter() - started))
    return rounds


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """One CUDA graph of all of `calls`, on the current device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up on a side stream, as capture asks for
        run_all(calls)
        run_all(calls)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all(calls)
    return graph


def _graph_rounds(calls: Sequence[Call], repeats: int) -> list[float]:
    graph = capture(calls)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in zip(marks, marks[1:], strict=False)]


def run_all(calls: Sequence[Call]) -> None:
    """Each of them once."""
    for call in calls:
        call()
