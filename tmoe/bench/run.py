"""Measure a selection of layers, one after the other; backends that are compared, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import product
from statistics import mean, median, pstdev
from typing import Any

import torch

import tmoe

from ..shapes import MoEShape, random_weights
from .cases import Case, experts_case, prepared_weights
from .machine import machine_info
from .peers import PEERS, Missing
from .roofline import matmul_tflops
from .timing import Round, round_of, seconds_in_turn

# What a cell may end with while the others go on: a wrong result, too little memory, and whatever
# other people's code raises when it is called in a way, or on a machine, that it wasn't made for.
WRONG = (AssertionError, torch.OutOfMemoryError)
WRONG_OF_PEERS = (
    AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError
)  # fmt: skip

Show = Callable[[str], None]  # called with a name before each cell


@dataclass(frozen=True, slots=True)
class Selection:
    """What is measured: every combination."""

    shapes: Sequence[MoEShape]
    tokens: Sequence[int]
    schemes: Sequence[str]
    routings: Sequence[str]
    backends: Sequence[str]

    def __len__(self) -> int:
        each = (self.shapes, self.tokens, self.schemes, self.routings, self.backends)
        return len([*product(*each)])


@dataclass(slots=True)
class Results:
    """What was measured so far, and what wasn't, with the reason."""

    machine: dict[str, Any]
    command: str
    benchmarks: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # backend and scheme -> why
    failed: dict[str, str] = field(default_factory=dict)  # cell -> what was wrong

    def as_json(self) -> dict[str, Any]:
        """As pytest-benchmark lays its files out; what it has no place for comes beside."""
        return {
            "machine_info": self.machine,
            "datetime": datetime.now(timezone.utc).isoformat(),
            "version": tmoe.__version__,
            "command": self.command,
            "benchmarks": self.benchmarks,
            "skipped": self.skipped,
            "failed": self.failed,
        }


@torch.no_grad()
def measure(
    selection: Selection, device: torch.device, dtype: torch.dtype, command: str, show: Show
) -> Iterator[Results]:
    """Yield the results so far after each cell; all of them are the same object.

    Cells that differ in the backend only are timed in turn. A result that is wrong, or doesn't fit
    into memory, is a failure and isn't timed; the rest goes on.
    """
    machine = machine_info(device)
    machine["matmul_tflops_at_start"] = matmul_tflops(device, dtype)
    results = Results(machine, command)
    for shape, scheme, weights in _weights(selection, device, dtype, results.failed):
        make = partial(
            experts_case, shape, weights=weights, scheme=scheme, device=device, dtype=dtype
        )
        for tokens, routing in product(selection.tokens, selection.routings):
            cell = f"{shape.name} {scheme} {routing} T={tokens}"
            cases: dict[str, Case] = {}
            rounds: dict[str, Round] = {}
            for backend in selection.backends:
                show(f"{cell} {backend}")
                try:
                    cases[backend] = make(tokens, backend, routing=routing)
                    cases[backend].verify()
                    rounds[backend] = round_of(cases[backend].calls, device)
                except (Missing, tmoe.NoBackendError) as reason:
                    results.skipped[f"{backend}, {scheme}"] = str(reason)
                except WRONG as error:
                    results.failed[f"{cell} {backend}"] = f"{type(error).__name__}: {error}"
                except WRONG_OF_PEERS as error:
                    if backend not in PEERS:
                        raise
                    results.failed[f"{cell} {backend}"] = f"{type(error).__name__}: {error}"
            times = dict(zip(rounds, seconds_in_turn([*rounds.values()], device), strict=True))
            for backend in selection.backends:
                show(f"{cell} {backend}")
                if backend in times:
                    results.benchmarks.append(_written(cases[backend], times[backend], machine))
                yield results
            del cases, rounds  # what their graphs hold
        del weights, make  # gigabytes: free them before the next layer
    machine["matmul_tflops_at_end"] = matmul_tflops(device, dtype)
    yield results


def _weights(
    selection: Selection, device: torch.device, dtype: torch.dtype, failed: dict[str, str]
) -> Iterator[tuple[MoEShape, str, Sequence[Any]]]:
    """Every shape in every scheme; gigabytes, so only one shape's are held. What doesn't fit, or
    can't be quantised so, is written into `failed`."""
    for shape in selection.shapes:
        for scheme in selection.schemes:
            torch.manual_seed(0)
            try:
                plain = random_weights(shape, device, dtype)
                weights = prepared_weights(plain, scheme)
            except (torch.OutOfMemoryError, ValueError) as error:
                failed[f"{shape.name} {scheme}"] = f"{type(error).__name__}: {error}"
                continue
            del plain
            yield shape, scheme, weights
            del weights


def _written(case: Case, seconds: Sequence[float], machine: dict[str, Any]) -> dict[str, Any]:
    """As pytest-benchmark writes a benchmark."""
    return {
        "name": f"{case.group} {case.backend}",
        "group": case.group,
        "extra_info": case.info(seconds) | {"versions": machine["versions"]},
        "stats": {
            "min": min(seconds),
            "max": max(seconds),
            "mean": mean(seconds),
            "stddev": pstdev(seconds),
            "median": median(seconds),
            "rounds": len(seconds),
            "data": seconds,
        },
    }
