"""In which order streams wait for one another, where there are none: a stand-in writes it down."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tmoe.parallel import beside as module
from tmoe.parallel.beside import Beside
from tmoe.parallel.peers import Peers

CUDA = torch.device("cuda", 0)


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_event(self):
        self.log.append(f"{self.name}: event")
        return f"event of {self.name}"

    def wait_event(self, event):
        self.log.append(f"{self.name}: waits for {event}")

    def wait_stream(self, other):
        self.log.append(f"{self.name}: waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    lines: list[str] = []
    streams = {name: Stream(name, lines) for name in ("main", "side", "other")}
    now = [streams["main"]]

    @contextmanager
    def entered(stream):
        now.append(stream)
        yield
        now.pop()

    stand_in = {
        "current_stream": lambda device: now[-1],
        "stream": entered,
        "is_current_stream_capturing": lambda: lines.capturing,
    }
    lines = Log(lines)
    for stream in streams.values():
        stream.log = lines
    for name, value in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(module, "_stream", lambda device: streams["side"])
    lines.streams, lines.now, lines.capturing = streams, now, False
    return lines


class Log(list):
    """With what the test changes."""


def test_a_shared_expert_begins_after_its_input_and_ends_before_its_use(log):
    x = SimpleNamespace(is_cuda=True, device=CUDA)
    found = SimpleNamespace(record_stream=lambda s: log.append(f"kept for {s.name}"))

    def work():
        log.append(f"shared expert on {log.now[-1].name}")
        return found

    aside = Beside(work, x, own_stream=True)
    log.append("tokens are sent")
    aside.start()
    log.append("sums are back")
    assert aside.result() is found
    assert log == [
        "main: event", "tokens are sent", "side: waits for event of main",
        "shared expert on side", "sums are back", "main: waits for side", "kept for main",
    ]  # fmt: skip


def test_without_a_stream_of_its_own_it_runs_in_turn(log):
    x = SimpleNamespace(is_cuda=True, device=CUDA)
    aside = Beside(lambda: log.append(log.now[-1].name), x, own_stream=False)
    aside.start()
    assert aside.result() is None and log == ["main"]
    nothing = Beside(None, x, own_stream=True)
    nothing.start()
    assert nothing.result() is None and log == ["main"]


def test_calls_that_share_memory_come_one_after_the_other(log):
    peers = Peers("")
    peers.follow(torch.device("cpu"))
    peers.follow(CUDA)
    peers.follow(CUDA)
    assert log == []
    log.now.append(log.streams["other"])
    peers.follow(CUDA)
    assert log == ["other: waits for main"]
    log.now.append(log.streams["main"])
    log.capturing = True  # a graph can't wait for what isn't in it
    peers.follow(CUDA)
    assert log == ["other: waits for main"]
