"""How rounds are made and read, on a GPU that is made up: its clock is the sum of what it ran."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from tmoe.bench import timing
from tmoe.bench.timing import (
    CALLS,
    LEAD_SECONDS,
    MOST_SECONDS,
    ROUNDS,
    WARM_SECONDS,
    round_of,
    round_on_gpu,
    seconds_in_turn,
    seconds_per_call,
    seconds_per_queued_call,
)

CUDA = torch.device("cuda")


class Graph:
    """Of calls that return the seconds that they take."""

    made: list[Graph] = []

    def __init__(self, calls):
        self.calls, self.replays = calls, 0
        Graph.made.append(self)

    def replay(self):
        self.replays += 1
        Event.clock += sum(call() for call in self.calls)


class Event:
    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.clock

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    Graph.made, Event.clock = [], 0.0
    monkeypatch.setattr(timing, "capture", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


@pytest.mark.parametrize("seconds", [1e-6, 1e-4, 1e-2])
def test_a_time_is_that_of_one_call(seconds):
    """Of three that take one, two and three times as long, the mean."""
    calls = [lambda n=n: n * seconds for n in (1, 2, 3)]
    found = seconds_per_call(calls, CUDA)
    assert found == pytest.approx([2 * seconds] * ROUNDS)


def test_a_short_round_has_more_calls_and_a_busy_gpu_before_it():
    one = round_on_gpu([lambda: 1e-6] * 3)
    assert one.calls == 3 * 7 >= CALLS  # 20 / 3, rounded up
    before = Event.clock
    one.before()
    assert Event.clock - before == pytest.approx(LEAD_SECONDS, rel=0.1)
    assert [len(graph.calls) for graph in Graph.made] == [3, 21]


def test_a_long_round_is_as_it_is():
    one = round_on_gpu([lambda: 3e-3] * 3)
    assert one.calls == 3 and len(Graph.made) == 1


@pytest.mark.parametrize("seconds", [1e-6, 1e-2])
def test_a_gpu_is_busy_for_a_while_before_the_first_round(seconds):
    """It comes from idle, and is slower until its clocks are up."""
    started = Event.clock

    def call():
        return seconds * (2 if Event.clock - started < 0.9 * WARM_SECONDS else 1)

    found = seconds_per_call([call], CUDA)
    assert found == pytest.approx([seconds] * ROUNDS)


def test_what_is_compared_is_timed_in_turn():
    """A GPU that gets slower is so for all, and nobody always comes first."""
    order = []

    def call(name, seconds):
        order.append(name)
        return seconds * (1 + Event.clock)

    rounds = [round_of([partial(call, name, 0.1)], CUDA) for name in "abc"]
    order.clear()
    a, b, c = seconds_in_turn(rounds, CUDA)
    each = len(rounds) * (ROUNDS + 1)
    firsts = order[-2 * each :: 6]  # with the replay that keeps the GPU busy before each
    assert firsts == [*"abc" * 4][: ROUNDS + 1]
    assert len(a) == len(b) == len(c) == ROUNDS
    assert sum(a) == pytest.approx(sum(b), rel=0.15) and sum(a) == pytest.approx(sum(c), rel=0.15)
    assert a[-1] > 5 * a[0]


@pytest.mark.parametrize("seconds", [1e-5, 1e-2])
def test_calls_that_cannot_be_captured_are_queued(seconds):
    """As many in a round as take some milliseconds, and two at least."""
    made = []

    def call():
        made.append(None)
        Event.clock += seconds

    found = seconds_per_queued_call(call, CUDA)
    assert found == pytest.approx([seconds] * ROUNDS) and not Graph.made
    warm = math.ceil(WARM_SECONDS / seconds)
    assert len(made) == pytest.approx(
        2 + warm + (ROUNDS + 1) * max(2, round(MOST_SECONDS / seconds)), abs=1
    )
