"""Measure: inside ``with tmoe.autotune():``, time what can run a problem, once.

Nowhere else is anything timed. Times are of real calls with the caller's tensors, in milliseconds;
they are kept in the `Store` of this machine. Its file is read once per process, at the first
decision, which is part of the warm-up call that a CUDA graph needs anyway; no later call opens one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from types import MappingProxyType

import torch

from ..environment import cache_dir, installed_version, kernels_hash, nvidia_driver
from ..options import current
from .problem import Machine, Problem
from .ranks import Key, agreed
from .store import MeasuredOn, Store, Times

WARM_UPS, REPEATS, GPU_REPEATS = 2, 5, 11
COLD_BYTES = 256 << 20  # written between two calls on a GPU: more than any L2 cache holds
CYCLES_PER_SECOND = 2e9  # of a GPU, at most or a little less
NOTHING: Mapping[str, float] = MappingProxyType({})


def _ignore(what: str, done: int, total: int) -> None:
    pass


@dataclass
class Tuning:
    """What an `autotune` block was asked for, and the entries of the store that it has met."""

    tiles: bool = False
    quick: bool = False
    again: bool = False
    progress: Callable[[str, int, int], None] = _ignore
    met: dict[Key, Machine] = field(default_factory=dict)

    def meet(self, machine: Machine, key: str) -> bool:
        """Note an entry; whether it is the first time in this block."""
        place = machine.device_type, key
        is_new = place not in self.met
        self.met[place] = machine
        return is_new


_tuning: ContextVar[Tuning | None] = ContextVar("tmoe_autotune", default=None)
_listeners: list[Callable[[], None]] = []


@contextmanager
def autotune(
    *,
    tiles: bool = False,
    quick: bool = False,
    again: bool = False,
    progress: Callable[[str, int, int], None] = _ignore,
) -> Iterator[None]:
    """Inside, the first call of every problem times all backends that can run it, and later calls,
    also of later processes on such a machine, take the fastest.

    A problem is an operation with its sizes, dtypes and options, its number of tokens rounded up to
    a power of two, so run the layer with the numbers of tokens that matter. Backends with a layout
    of their own take part, as inside `tmoe.prepare`; in the end only the fastest one's is kept.
    Calls with a forced backend, while gradients are needed, or while a CUDA graph is captured are
    left alone. Local to the thread and to the asyncio task.

    Under `torch.distributed` with several ranks, all of them must enter and leave the block. On
    leaving it they agree, whatever each has measured or knew before: of every time the slowest
    rank's counts, and what one of them couldn't run none takes. Nothing is communicated elsewhere.

    Args:
        tiles: time the tiles of the Triton kernels too, some dozens, each compiled first. One whose
            result isn't that of the usual tiles is left out, and one that can't run.
        quick: fewer of them.
        again: measure also what was measured before.
        progress: called with what is timed next, how many were, and of how many.
    """
    asked = Tuning(tiles, quick, again, progress)
    token = _tuning.set(asked)
    try:
        yield
    finally:
        _tuning.reset(token)
    mine = {place: known(machine, place[1]) for place, machine in asked.met.items()}
    for place, times in agreed(mine).items():
        machine = asked.met.get(place) or Machine.of(place[0])
        if times != known(machine, place[1]):
            keep(machine, place[1], times)


def tuning() -> Tuning | None:
    """What the `autotune` block around this call asks for; None outside, and where the call can't
    be repeated."""
    asked = _tuning.get()
    if asked is None or not torch.cuda.is_available():
        return asked
    return None if torch.cuda.is_current_stream_capturing() else asked


def known_times(problem: Problem) -> Mapping[str, float]:
    """Milliseconds by backend, as far as they were measured on the problem's machine."""
    return known(problem.machine, problem.key)


def known(machine: Machine, key: str) -> Mapping[str, float]:
    """Milliseconds by candidate of an entry of the machine's store."""
    return _times(machine, _folder()).get(key, NOTHING)


def keep(machine: Machine, key: str, times: Mapping[str, float]) -> None:
    """Put these times in place of an entry, here and in the store; whoever listens hears of it."""
    _times(machine, _folder())[key] = dict(times)
    store_of(machine).add({key: times}, whole=True)
    for hear in _listeners:
        hear()


def when_times_change(hear: Callable[[], None]) -> None:
    """Have `hear` called whenever times were added: a choice may be another one now."""
    _listeners.append(hear)


def measure(problem: Problem, runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Time each of `runs`, by backend, and keep the times. One that raises has none, and a warning
    says why."""
    progress = (_tuning.get() or Tuning()).progress
    measured = {}
    for i, (name, run) in enumerate(runs.items()):
        progress(name, i, len(runs))
        try:
            measured[name] = milliseconds(run, problem.machine)
        except Exception as error:  # noqa: BLE001  whatever it does, another backend can run
            warnings.warn(f"autotune: {name} failed on {problem}: {error}", stacklevel=3)
    if measured:
        keep(problem.machine, problem.key, measured)
    return measured


def milliseconds(run: Callable[[], object], machine: Machine) -> float:
    """How long a call takes: on a GPU, the GPU; it finds its weights in memory, not in a cache."""
    return _milliseconds(run, machine.device_type)


def _milliseconds(run: Callable[[], object], device_type: str) -> float:
    for _ in range(WARM_UPS):
        started = time.perf_counter()
        run()
    seconds = time.perf_counter() - started  # that Python needs for the launches
    if device_type == "cuda":
        return median(_on_gpu(run, seconds))
    return median(_wall_clock(run) for _ in range(REPEATS))


def _on_gpu(run: Callable[[], object], seconds: float) -> list[float]:
    """The GPU is kept busy until all calls are queued, so that launching them doesn't count."""
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(GPU_REPEATS)
    ]
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(int(min(2 * GPU_REPEATS * seconds, 0.25) * CYCLES_PER_SECOND))
    for start, end in pairs:
        cold.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [max(start.elapsed_time(end), 1e-6) for start, end in pairs]


def _wall_clock(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


def store_of(machine: Machine) -> Store:
    """Where the times of a machine are kept."""
    return _store(machine, _folder())


def _folder() -> Path:
    return (current().cache_dir or cache_dir()) / "times"


@cache
def _times(machine: Machine, folder: Path) -> Times:
    """The times of this process: the store's, as they were at the first look, and its own."""
    return _store(machine, folder).read()


@cache
def _store(machine: Machine, folder: Path) -> Store:
    return Store(folder, _measured_on(machine))


def _measured_on(machine: Machine) -> MeasuredOn:
    return MeasuredOn(
        machine.name, nvidia_driver() if machine.device_type == "cuda" else None,
        machine.torch_version, machine.triton_version, machine.flashinfer_version,
        f"{installed_version('tmoe') or 'unknown'} {kernels_hash()}",
    )  # fmt: skip
