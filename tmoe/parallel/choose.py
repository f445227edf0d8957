"""Which exchange runs: each says why it can't, or how long it should take; the shortest is taken.

All ranks must come to the same answer, so it depends on nothing but what they agree on. The times
are a rough model: bytes that a rank sends, over a bandwidth, and a latency for each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ..checks import expect
from ..dispatch.resolve import Candidate

# Of a link between GPUs of one host, as NCCL uses it, and of a collective and a small kernel.
BYTES_PER_SECOND, COLLECTIVE, KERNEL = 300e9, 15e-6, 3e-6


@dataclass(frozen=True, slots=True)
class ExchangeProblem:
    """What an exchange has to do, the same on all ranks."""

    tokens: int  # the most that a rank has, as a bucket
    hidden: int
    top_k: int
    itemsize: int  # bytes of a number in x
    owners: int  # ranks with tokens of their own
    shares: int  # ranks that divide experts and have the same tokens
    width: int  # ranks among which each expert's width is divided
    fixed: bool = False  # nothing may depend on the data
    capacity: int | None = None  # rows for each rank, of the fixed all-to-all; None: all tokens
    slot_by_slot: bool = False

    @property
    def experts(self) -> int:
        return self.owners * self.shares

    @property
    def wide(self) -> int:
        return max(self.itemsize, 4)

    def __str__(self) -> str:
        sizes = {"dp": self.owners, "ep": self.experts, "tp": self.width}
        parts = [f"T<={self.tokens}", f"H={self.hidden}", f"K={self.top_k}"]
        parts += [f"{name}={size}" for name, size in sizes.items() if size > 1]
        parts += ["fixed"] if self.fixed else []
        parts += ["slot by slot"] if self.slot_by_slot else []
        return f"exchange({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A way to bring tokens to experts."""

    why_not: Callable[[ExchangeProblem], str | None]
    cost: Callable[[ExchangeProblem], tuple[float, int, int]]  # bytes, collectives, kernels


@dataclass(frozen=True, slots=True)
class ExchangeDecision:
    """The chosen exchange and what was thought of each, best first."""

    problem: ExchangeProblem
    chosen: str
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        lines = [f"{self.problem}: {self.chosen}"]
        for answer in self.candidates:
            mark = "->" if answer.name == self.chosen else "  "
            verdict = "yes" if answer.accepted else "no "
            lines.append(f"{mark} {answer.name:<10}  {verdict}  {answer.reason}")
        return "\n".join(lines)

    __repr__ = __str__


def _gather_cost(p: ExchangeProblem) -> tuple[float, int, int]:
    row, sums = p.hidden * p.itemsize + 8 * p.top_k, p.hidden * p.wide * _per_row(p)
    moved = float((p.owners - 1) * p.tokens * (row + sums))
    copies = p.shares * p.width
    moved += 2 * (copies - 1) / copies * p.tokens * sums
    return moved, 2 * (p.owners > 1) + (copies > 1), 2


def _to_all_cost(p: ExchangeProblem) -> tuple[float, int, int]:
    row, sums = p.hidden * p.itemsize + 8 * p.top_k, p.hidden * p.wide * _per_row(p)
    mine, P = p.tokens / p.shares, p.experts
    rows: float = mine * (1 - (1 - 1 / P) ** p.top_k)  # for each rank
    if p.fixed:
        rows = mine if p.capacity is None else min(p.capacity, mine)
    moved = (P - 1) * rows * (row + sums)
    moved += 2 * (p.width - 1) / p.width * mine * p.hidden * p.wide
    moved += (p.shares - 1) * mine * p.hidden * p.wide
    steps = 2 + (p.width > 1) + (p.shares > 1) + 2 * (not p.fixed)
    return moved, steps, 25


def _per_row(p: ExchangeProblem) -> int:
    return p.top_k if p.slot_by_slot else 1


EXCHANGES = {
    "all_gather": Exchange(lambda p: None, _gather_cost),
    "all_to_all": Exchange(
        lambda p: None if p.experts > 1 else "experts aren't divided among ranks (ep 1)",
        _to_all_cost,
    ),
}


@lru_cache(maxsize=4096)
def choose(problem: ExchangeProblem, forced: str | None = None) -> ExchangeDecision:
    """The fastest exchange that can do it, or `forced`.

    Raises ``ValueError`` for an unknown name, or one that can't do it.
    """
    names = ", ".join(EXCHANGES)
    known = forced is None or forced in EXCHANGES
    expect(known, "parallelize", "exchange", f"None or one of {names}", repr(forced))
    answers = []
    for name, exchange in EXCHANGES.items():
        reason = exchange.why_not(problem)
        if reason is not None:
            answers.append((float("inf"), Candidate(name, False, reason)))
            continue
        moved, steps, kernels = exchange.cost(problem)
        seconds = moved / BYTES_PER_SECOND + steps * COLLECTIVE + kernels * KERNEL
        said = f"{moved / 1e6:.3g} MB per rank, {steps} collectives: about {seconds * 1e6:.0f} us"
        answers.append((seconds, Candidate(name, True, said, None)))
    answers.sort(key=lambda answer: answer[0])
    candidates = tuple(candidate for _, candidate in answers)
    chosen = forced or candidates[0].name
    found = next(c for c in candidates if c.name == chosen)
    expect(
        found.accepted, "parallelize", "exchange", "one that can do it", f"{chosen}: {found.reason}"
    )
    return ExchangeDecision(problem, chosen, candidates)
