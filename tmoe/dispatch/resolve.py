"""Filter, then rank: from a problem to the backend that runs it, with every candidate's reason.

Pure functions of the problem and of what was measured, so that a laptop can ask them about any
machine. Where times are known, the fastest goes first; the table of `ranking.py` decides the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .. import registry
from .backend import Backend
from .problem import Problem
from .ranking import ranking

NO_TIMES: Mapping[str, float] = MappingProxyType({})


class NoBackendError(RuntimeError):
    """No backend can run the problem, or the forced one can't; the message has the reasons."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend's answer."""

    name: str
    accepted: bool
    reason: str  # why not; or, when accepted, why it stands where it does
    timing: float | None = None  # measured milliseconds; None: not measured


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen backend and the trace that led to it, best candidate first."""

    problem: Problem
    chosen: str
    candidates: tuple[Candidate, ...]
    exchange: object = None  # of a layer on several ranks: `tmoe.parallel.ExchangeDecision`

    def __str__(self) -> str:
        own = f"{self.problem}: {self.chosen}\n{_table(self.candidates, self.chosen)}"
        return own if self.exchange is None else f"{self.exchange}\n{own}"

    __repr__ = __str__


def candidates(
    problem: Problem,
    backends: Mapping[str, Backend] | None = None,
    times: Mapping[str, float] = NO_TIMES,
) -> tuple[Candidate, ...]:
    """What every backend says to `problem`, in the order of preference on its machine.

    `backends` replaces the registered ones (tests, other people's dispatchers). `times`: measured
    milliseconds by backend.
    """
    preferred = ranking(problem.machine)
    names = registry.names() if backends is None else tuple(backends)
    ordered = [name for name in preferred if name in names] + [
        name for name in names if name not in preferred
    ]
    answers = [
        _ask(name, problem, backends, preferred.get(name, "not ranked on this machine"), times)
        for name in ordered
    ]
    return tuple(sorted(answers, key=_measured_first))


def _measured_first(answer: Candidate) -> float:
    return math.inf if answer.timing is None else answer.timing


def resolve(
    problem: Problem,
    forced: str | None = None,
    backends: Mapping[str, Backend] | None = None,
    times: Mapping[str, float] = NO_TIMES,
) -> Decision:
    """The first candidate that accepts `problem`, or `forced` if that one accepts.

    Raises ``ValueError`` if there is no backend called `forced`, `NoBackendError` if none accepts.
    """
    names = registry.names() if backends is None else tuple(backends)
    if forced is not None and forced not in names:
        raise ValueError(f"resolve: backend must be one of {', '.join(names)}, got {forced!r}")
    answers = candidates(problem, backends, times)
    if forced is None:
        chosen = next((answer.name for answer in answers if answer.accepted), None)
        if chosen is None:
            reasons = "\n".join(f"  {answer.name}: {answer.reason}" for answer in answers)
            raise NoBackendError(f"no backend can run {problem}\n{reasons}")
        return Decision(problem, chosen, answers)
    answer = next(answer for answer in answers if answer.name == forced)
    if not answer.accepted:
        raise NoBackendError(
            f"backend {forced!r} was asked for and can't run {problem}: {answer.reason}"
        )
    return Decision(problem, forced, answers)


def _ask(
    name: str,
    problem: Problem,
    backends: Mapping[str, Backend] | None,
    place: str,
    times: Mapping[str, float],
) -> Candidate:
    try:
        backend = registry.load(name) if backends is None else backends[name]
    except ImportError as error:  # an optional library is missing: a reason like any other
        return Candidate(name, False, f"can't be imported: {error}")
    reason = backend.why_not(problem)
    if reason is not None:
        return Candidate(name, False, reason, times.get(name))
    form = backend.form(problem) if hasattr(backend, "form") else ""
    return Candidate(name, True, f"{place}; {form}" if form else place, times.get(name))


def _table(answers: tuple[Candidate, ...], chosen: str) -> str:
    width = max(len(answer.name) for answer in answers)
    lines = []
    for answer in answers:
        mark = "->" if answer.name == chosen else "  "
        verdict = "yes" if answer.accepted else "no "
        timing = "" if answer.timing is None else f"{duration(answer.timing)}  "
        lines.append(f"{mark} {answer.name:<{width}}  {verdict}  {timing}{answer.reason}")
    return "\n".join(lines)


def duration(ms: float) -> str:
    """Milliseconds as one reads them: 41.3 us, 1.250 ms."""
    return f"{1e3 * ms:.1f} us" if ms < 1 else f"{ms:.3f} ms"
