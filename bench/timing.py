"""How pytest-benchmark times a call here: by the GPU's own clock, or by the CPU's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from tmoe.demo.timing import capture

Call = Callable[[], object]

ROUNDS = 10
LEAD_SECONDS = 1e-3
CALLS = 20  # at least, in a round: so that what it takes to start a graph is little
MOST_SECONDS = 5e-3  # of a round, beyond which its inputs are calls enough


class DeviceTimer:
    """A timer for pytest-benchmark in seconds per call, where a round is `calls` calls.

    pytest-benchmark reads its timer before and after a round and subtracts. A reading here is an
    event in the stream; nothing waits for it until the subtraction, so launching isn't measured.
    """

    __name__ = "DeviceTimer"  # what pytest-benchmark writes into its JSON
    calls = 1

    def __call__(self) -> _Reading:
        return _Reading(self.calls)


class _Reading:
    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: _Reading) -> float:
        self.event.synchronize()
        return 1e-3 * earlier.event.elapsed_time(self.event) / self.calls


def time_on_gpu(benchmark: BenchmarkFixture, timer: DeviceTimer, calls: Sequence[Call]) -> None:
    """Rounds are replays of one CUDA graph of all calls.

    Before a round come replays that aren't timed: the GPU is still busy with them when the round is
    queued, so that launching the graph, 0.3 ms for some dozens of kernels, isn't measured.
    """
    graph = capture(calls)
    seconds = _replay_seconds(timer, graph)
    times = min(math.ceil(CALLS / len(calls)), math.floor(MOST_SECONDS / seconds))
    if times > 1:
        calls = [*calls] * times
        graph = capture(calls)
        seconds *= times
    lead = math.ceil(LEAD_SECONDS / seconds)

    def keep_busy() -> None:
        for _ in range(lead):
            graph.replay()

    timer.calls = len(calls)
    benchmark.pedantic(graph.replay, setup=keep_busy, rounds=ROUNDS, warmup_rounds=1)


def _replay_seconds(timer: DeviceTimer, graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    timer.calls = 1
    start = timer()
    graph.replay()
    return timer() - start


def time_on_cpu(benchmark: BenchmarkFixture, calls: Sequence[Call]) -> None:
    """Rounds go through all calls in turn."""
    turns = cycle(calls)
    benchmark.pedantic(lambda: next(turns)(), rounds=ROUNDS, iterations=len(calls), warmup_rounds=1)
