"""Which exchange runs: each says why it can't, or how long it should take; the shortest is taken.

All ranks must come to the same answer, so it depends on nothing but what they agree on. The times
are those of `exchange_model.py`, with the links of communication.json; on CPUs, whose links nobody
measured, they rank the exchanges as they would be ranked on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ..checks import expect
from ..dispatch.resolve import Candidate
from . import exchange_model
from .communication_model import Cluster, Span, Transfer
from .exchange_model import MOST_PEER_BYTES, bytes_needed

GPU = "H200"  # whose links were measured
ROUTE = 8  # bytes of an expert's id and weight
COUNTS = 8.0  # bytes that ranks tell each other before exact rows are sent


@dataclass(frozen=True, slots=True)
class ExchangeProblem:
    """What an exchange has to do, the same on all ranks."""

    tokens: int  # the most that a rank has, as a bucket
    hidden: int
    top_k: int
    row_bytes: int  # of a token on its way to experts, without its routes
    sum_bytes: int  # of a number on its way back: 4 of float32
    wide_bytes: int  # of a number of a sum
    owners: int  # ranks with tokens of their own
    shares: int  # ranks that divide experts and have the same tokens
    width: int  # ranks among which each expert's width is divided
    nodes: int = 1  # that all of them are on
    fixed: bool = False  # nothing may depend on the data
    capacity: int | None = None  # rows for each rank, of the fixed all-to-all; None: all tokens
    slot_by_slot: bool = False
    codes: str = ""  # the format of tokens that are quantised before they are sent
    gradients: bool = False
    no_peers: str = ""  # why ranks can't write one another's memory

    @property
    def experts(self) -> int:
        return self.owners * self.shares

    @property
    def per_row(self) -> int:
        """Rows of sums for each token."""
        return self.top_k if self.slot_by_slot else 1

    def span(self, ranks: int) -> Span:
        return Span(ranks, min(ranks, self.nodes))

    def __str__(self) -> str:
        sizes = {"dp": self.owners, "ep": self.experts, "tp": self.width, "nodes": self.nodes}
        parts = [f"T<={self.tokens}", f"H={self.hidden}", f"K={self.top_k}"]
        parts += [f"{name}={size}" for name, size in sizes.items() if size > 1]
        parts += ["fixed"] if self.fixed else []
        parts += [f"capacity {self.capacity}"] if self.capacity is not None else []
        parts += ["slot by slot"] if self.slot_by_slot else []
        parts += [f"{self.codes} tokens"] if self.codes else []
        parts += ["with gradients"] if self.gradients else []
        parts += ["16-bit sums"] if self.sum_bytes < self.wide_bytes else []
        return f"exchange({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A way to bring tokens to experts."""

    why_not: Callable[[ExchangeProblem], str | None]
    cost: Callable[[ExchangeProblem, Cluster], Transfer]
    what: str


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
            lines.append(f"{mark} {answer.name:<{WIDTH}}  {verdict}  {answer.reason}")
        return "\n".join(lines)

    __repr__ = __str__


def _gather_cost(p: ExchangeProblem, cluster: Cluster) -> Transfer:
    back = p.hidden * p.wide_bytes * p.per_row
    sent = p.row_bytes + ROUTE * p.top_k
    copies = p.shares * p.width
    gathered = exchange_model.all_gather(cluster, p.span(p.owners), p.tokens, sent, back, p.hidden)
    return gathered + cluster.all_reduce(p.tokens * back, p.span(copies))


def _to_all_cost(p: ExchangeProblem, cluster: Cluster) -> Transfer:
    span, mine = p.span(p.experts), p.tokens / p.shares
    rows: float = mine * (1 - (1 - 1 / p.experts) ** p.top_k)  # for each rank
    if p.fixed:
        rows = mine if p.capacity is None else min(p.capacity, mine)
    sent, back = p.row_bytes + ROUTE * p.top_k, p.hidden * p.sum_bytes * p.per_row
    found = exchange_model.all_to_all(cluster, span, rows, sent, back, p.hidden)
    if not p.fixed:
        found = found + cluster.all_to_all(COUNTS * p.experts, 0.0, span)
    found = found + cluster.all_reduce(mine * p.hidden * p.wide_bytes, p.span(p.width))
    return found + cluster.gather("all_gather", mine * p.hidden * 2, p.span(p.shares))


def _symmetric_cost(p: ExchangeProblem, cluster: Cluster) -> Transfer:
    mine = p.tokens / p.shares
    rows = mine * (1 - (1 - 1 / p.experts) ** p.top_k)  # for each rank; no others are sent
    sent, back = p.row_bytes + ROUTE * p.top_k, p.hidden * p.sum_bytes * p.per_row
    found = exchange_model.symmetric_memory(cluster, p.experts, rows, sent, back, p.hidden)
    found = found + cluster.all_reduce(mine * p.hidden * p.wide_bytes, p.span(p.width))
    return found + cluster.gather("all_gather", mine * p.hidden * 2, p.span(p.shares))


def _why_not_gather(p: ExchangeProblem) -> str | None:
    if p.sum_bytes < p.wide_bytes:
        return "its sums would be added up in 16 bits, and are wanted in float32"
    return None


def _why_not_to_all(p: ExchangeProblem) -> str | None:
    return None if p.experts > 1 else "experts aren't divided among ranks (ep 1)"


def _why_not_symmetric(p: ExchangeProblem) -> str | None:
    if p.no_peers:
        return p.no_peers
    if p.experts == 1:
        return _why_not_to_all(p)
    if p.nodes > 1:
        return f"its ranks are on {p.nodes} hosts, and it writes over the NVLink of one"
    if p.gradients:
        return "gradients are needed, and it has none"
    if p.wide_bytes > 4:
        return "its sums are in float32, and these are wanted in float64"
    rows = -(-p.tokens // p.shares)
    rows = rows if p.capacity is None else min(rows, p.capacity)
    row_bytes, sum_bytes = p.row_bytes + ROUTE * p.top_k, p.hidden * p.sum_bytes
    needed = bytes_needed(p.experts, rows, row_bytes, sum_bytes, p.per_row)
    if needed > MOST_PEER_BYTES:
        most = f"it may have {MOST_PEER_BYTES >> 20}"
        return f"it needs {needed >> 20} MiB of every GPU for {rows} rows from each rank; {most}"
    return None


EXCHANGES = {
    "all_gather": Exchange(_why_not_gather, _gather_cost, "each token to every rank"),
    "all_to_all": Exchange(_why_not_to_all, _to_all_cost, "each token to its experts' ranks"),
    "symmetric_memory": Exchange(
        _why_not_symmetric, _symmetric_cost, "each token into the memory of its experts' GPUs"
    ),
}
WIDTH = max(map(len, EXCHANGES))


@lru_cache(maxsize=4096)
def choose(problem: ExchangeProblem, forced: str | None = None) -> ExchangeDecision:
    """The fastest exchange that can do it, or `forced`.

    Raises ``ValueError`` for an unknown name, or one that can't do it.
    """
    names = ", ".join(EXCHANGES)
    known = forced is None or forced in EXCHANGES
    expect(known, "parallelize", "exchange", f"None or one of {names}", repr(forced))
    cluster, answers = Cluster.of(GPU), []
    for name, exchange in EXCHANGES.items():
        reason = exchange.why_not(problem)
        if reason is not None:
            answers.append((float("inf"), Candidate(name, False, reason)))
            continue
        us = exchange.cost(problem, cluster)
        parts = f"{us.start_us:.0f} starts, {us.us - us.start_us - us.copies_us:.0f} links"
        said = (
            f"about {us.us:.0f} us on {GPU}s ({parts}, {us.copies_us:.0f} copies): {exchange.what}"
        )
        answers.append((us.us, Candidate(name, True, said, None)))
    answers.sort(key=lambda answer: answer[0])
    candidates = tuple(candidate for _, candidate in answers)
    chosen = forced or candidates[0].name
    found = next(c for c in candidates if c.name == chosen)
    expect(
        found.accepted, "parallelize", "exchange", "one that can do it", f"{chosen}: {found.reason}"
    )
    return ExchangeDecision(problem, chosen, candidates)
