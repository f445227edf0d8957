"""Measure: inside ``with tmoe.autotune():``, time every backend that accepts a problem, once.

Nowhere else is anything timed, and only there and inside ``with tmoe.prepare():`` weights are
brought into another layout. Times are of real calls with the caller's tensors, in milliseconds;
they are kept in the `Store` of this machine, which is read once per process, at the first decision.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from statistics import median

import torch

from ..environment import cache_dir, installed_version
from .problem import Machine, Problem
from .store import MeasuredOn, Store, Times

WARM_UPS, REPEATS = 2, 5
_doing: ContextVar[str] = ContextVar("tmoe_doing", default="")  # "prepare" or "autotune"


@contextmanager
def autotune() -> Iterator[None]:
    """Inside, the first call of every problem times all backends that can run it, and later calls,
    also of later processes on such a machine, take the fastest.

    A problem is an operation with its sizes, dtypes and options, its number of tokens rounded up to
    a power of two, so run the layer with the numbers of tokens that matter. Backends with a layout
    of their own take part, as inside `prepare`; in the end only the fastest one's is kept. Calls
    with a forced backend, while gradients are needed, or while a CUDA graph is captured are left
    alone. Local to the thread and to the asyncio task.
    """
    with _do("autotune"):
        yield


@contextmanager
def prepare() -> Iterator[None]:
    """Inside, the first call of every layer brings its weights into the layout of the backend that
    is preferred on this machine, if that one has its own, and compares a result with Triton's.

        with torch.inference_mode(), tmoe.prepare():
            model(**some_inputs)  # at load time, once

    Later calls of the layer, outside, run on that backend. The layout is a copy of the weights:
    `prepared` lists what is held, `release` lets go of it, and so does a layer that is freed. A
    backend whose result differs, or that can't be called, isn't used; a warning says why, and
    `explain` from then on. With a forced backend the weights are prepared for that one. Calls that
    need gradients, or while a CUDA graph is captured, are left alone.
    """
    with _do("prepare"):
        yield


@contextmanager
def _do(what: str) -> Iterator[None]:
    token = _doing.set(what)
    try:
        yield
    finally:
        _doing.reset(token)


def doing() -> str:
    """ "autotune" or "prepare" if this call is inside, and may be repeated; else ""."""
    what = _doing.get()
    if what and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return ""
    return what


def known_times(problem: Problem) -> Mapping[str, float]:
    """Milliseconds by backend, as far as they were measured on the problem's machine."""
    return _times(problem.machine).get(problem.key, {})


def measure(problem: Problem, runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Time each of `runs`, by backend, and keep the times. One that raises has none, and a warning
    says why."""
    device = problem.machine.device_type
    measured = {}
    for name, run in runs.items():
        try:
            measured[name] = _milliseconds(run, device)
        except Exception as error:  # noqa: BLE001  whatever it does, another backend can run
            warnings.warn(f"autotune: {name} failed on {problem}: {error}", stacklevel=3)
    if measured:
        _times(problem.machine).setdefault(problem.key, {}).update(measured)
        _store(problem.machine).add({problem.key: measured})
    return measured


def _milliseconds(run: Callable[[], object], device_type: str) -> float:
    for _ in range(WARM_UPS):
        run()
    return median(_one(run, device_type) for _ in range(REPEATS))


def _one(run: Callable[[], object], device_type: str) -> float:
    if device_type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end), 1e-6)
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


@cache
def _times(machine: Machine) -> Times:
    """The times of this process: the store's, as they were at the first look, and its own."""
    return _store(machine).read()


@cache
def _store(machine: Machine) -> Store:
    return Store(cache_dir() / "times", _measured_on(machine))


def _measured_on(machine: Machine) -> MeasuredOn:
    driver = None
    if machine.device_type == "cuda" and torch.version.cuda is not None:
        ask = getattr(torch._C, "_cuda_getDriverVersion", lambda: None)
        driver = str(ask())
    return MeasuredOn(
        machine.name, driver, machine.torch_version, machine.triton_version,
        machine.flashinfer_version, installed_version("tmoe") or "unknown",
    )  # fmt: skip
