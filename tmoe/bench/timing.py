"""How calls are timed here: by the GPU's own clock, or by the CPU's.

A GPU under much load lowers its clocks, and raises them again within half a second when the load
is less. So that none inherits the clocks of what came before, such as a check in fp64, the GPU is
busy with the calls themselves before the first round; and what is compared is timed in turn, a
round of each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch

from ..demo.timing import capture, run_all

Call = Callable[[], object]

ROUNDS = 10
WARM_SECONDS = 0.5
LEAD_SECONDS = 1e-3
CALLS = 20  # at least, in a round: so that what it takes to start a graph is little
MOST_SECONDS = 5e-3  # of a round, beyond which its inputs are calls enough


class DeviceTimer:
    """A timer, for pytest-benchmark too, in seconds per call, where a round is `calls` calls.

    It is read before and after a round, and the readings are subtracted. A reading is an event in
    the stream; nothing waits for it until the subtraction, so launching isn't measured.
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


@dataclass(frozen=True, slots=True)
class Round:
    """What is timed at once, and what isn't but comes before it."""

    run: Call
    before: Call
    calls: int  # that `run` makes
    seconds: float = 0.0  # that it takes a GPU, about


def round_of(calls: Sequence[Call], device: torch.device) -> Round:
    """A round of these calls: on a CPU, each of them once."""
    if device.type == "cpu":
        return Round(partial(run_all, calls), partial(run_all, ()), len(calls))
    with torch.cuda.device(device):
        return round_on_gpu(calls)


def round_on_gpu(calls: Sequence[Call]) -> Round:
    """The replay of one CUDA graph of all calls.

    Before it come replays that aren't timed: the GPU is still busy with them when the round is
    queued, so that launching the graph, 0.3 ms for some dozens of kernels, isn't measured.
    """
    graph = capture(calls)
    seconds = _replay_seconds(graph)
    times = min(math.ceil(CALLS / len(calls)), math.floor(MOST_SECONDS / seconds))
    if times > 1:
        calls = [*calls] * times
        graph = capture(calls)
        seconds *= times
    lead = math.ceil(LEAD_SECONDS / seconds)

    def keep_busy() -> None:
        for _ in range(lead):
            graph.replay()

    return Round(graph.replay, keep_busy, len(calls), seconds)


def warm_up(rounds: Sequence[Round]) -> None:
    """Keep the current GPU busy with them, one after the other."""
    for _ in range(math.ceil(WARM_SECONDS / sum(one.seconds for one in rounds))):
        for one in rounds:
            one.run()


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    timer = DeviceTimer()
    graph.replay()
    start = timer()
    graph.replay()
    return timer() - start


def one_call_at_a_time(calls: Sequence[Call]) -> Call:
    """A function that makes all calls in turn, one each time."""
    turns = cycle(calls)
    return lambda: next(turns)()


def seconds_per_call(calls: Sequence[Call], device: torch.device) -> list[float]:
    """Seconds of a call, of each of `ROUNDS` rounds: of GPU time, or of wall time on a CPU."""
    return seconds_in_turn([round_of(calls, device)], device)[0]


def seconds_in_turn(rounds: Sequence[Round], device: torch.device) -> list[list[float]]:
    """The same for each of several, of which another one comes first each time."""
    readings: list[list[float]] = [[] for _ in rounds]
    with _current(device):
        if device.type == "cuda" and rounds:
            warm_up(rounds)
        for number in range(ROUNDS + 1):  # the first is for warming up
            for i in range(len(rounds)):
                which = (number + i) % len(rounds)
                readings[which].append(_seconds(rounds[which], device))
    return [each[1:] for each in readings]


def _seconds(one: Round, device: torch.device) -> float:
    """Of a call in that round."""
    one.before()
    if device.type == "cpu":
        started = time.perf_counter()
        one.run()
        return (time.perf_counter() - started) / one.calls
    timer = DeviceTimer()
    timer.calls = one.calls
    start = timer()
    one.run()
    return timer() - start


def _current(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def seconds_per_queued_call(call: Call, device: torch.device) -> list[float]:
    """The same of calls that are made one after another from Python: for one that waits for the GPU
    and so can't be captured. What it waits, and what Python takes then, is part of it."""
    if device.type == "cpu":
        return seconds_per_call([call], device)
    with torch.cuda.device(device):
        timer, readings = DeviceTimer(), []
        call()
        start = timer()
        call()
        seconds = timer() - start
        for _ in range(math.ceil(WARM_SECONDS / seconds)):
            call()
        timer.calls = max(2, math.ceil(MOST_SECONDS / seconds))
        for _ in range(ROUNDS + 1):
            start = timer()
            for _ in range(timer.calls):
                call()
            readings.append(timer() - start)
    return readings[1:]
