"""Measure: inside ``with tmoe.autotune():``, time every backend that accepts a problem, once.

Nowhere else is anything timed. Times are of real calls with the caller's tensors, in milliseconds;
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
_tuning: ContextVar[bool] = ContextVar("tmoe_autotune", default=False)


@contextmanager
def autotune() -> Iterator[None]:
    """Inside, the first call of every problem times all backends that can run it, and later calls,
    also of later processes on such a machine, take the fastest.

    A problem is an operation with its sizes, dtypes and options, its number of tokens rounded up to
    a power of two, so run the layer with the numbers of tokens that matter. Calls with a forced
    backend, while gradients are needed, or while a CUDA graph is captured are left alone. Local to
    the thread and to the asyncio task.
    """
    token = _tuning.set(True)
    try:
        yield
    finally:
        _tuning.reset(token)


def is_tuning() -> bool:
    """Whether this call is inside `autotune`, and may be repeated."""
    if not _tuning.get():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


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
        installed_version("flashinfer-python"), installed_version("tmoe") or "unknown",
    )  # fmt: skip
