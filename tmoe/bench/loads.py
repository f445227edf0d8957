"""How many experts get tokens, and how many rows are computed for them, before anything is routed.

A token draws K different experts; q_e is the chance that e is among them, so that sum(q_e) = K.
Of T tokens, expert e gets T q_e rows on average, and at least one with chance 1 - (1 - q_e)^T.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..checks import expect
from .shapes import ROUTINGS, ZIPF

LOWEST, HIGHEST = 16, 64  # rows that are padded to: a power of two near the mean, within these
# Tiles are 128 rows high at most, but an expert's tail of up to 64 rows is computed by half of one.


@dataclass(frozen=True, slots=True)
class Load:
    """What a rank's experts are given; means over many draws."""

    rows: float  # (token, expert) pairs
    touched: float  # experts with at least one row
    padded_rows: float  # as computed, in tiles

    @classmethod
    def of(cls, chances: Sequence[float], num_tokens: int, *, even: bool = False) -> Load:
        """Of experts that a token chooses with these chances. even: their counts differ by at most
        one, as balanced routing has it, instead of being random."""
        E, T = len(chances), num_tokens
        rows = T * sum(chances)
        step = _step(rows / E)
        touched = padded = 0.0
        for chance, experts in Counter(chances).items():
            mean = T * chance
            used = min(1.0, mean) if even else 1 - (1 - chance) ** T
            deviation = 0.0 if even else math.sqrt(mean * (1 - chance))
            touched += experts * used
            padded += experts * step * _steps(mean, deviation, used, step)
        return cls(rows, touched, max(rows, padded))


def _step(rows_per_expert: float) -> int:
    power = math.ceil(math.log2(max(1.0, rows_per_expert)))
    return int(min(HIGHEST, max(LOWEST, 2**power)))


def _steps(mean: float, deviation: float, used: float, step: int) -> float:
    """The mean of ceil(n / step): the sum over k >= 0 of the chance that n > k step, for n that is
    about normal, and 0 with chance 1 - used."""
    if deviation == 0:
        return used * max(1, math.ceil(mean / step))
    total, k = used, 1
    sure = int((mean - 6 * deviation) / step)  # so many are exceeded in any case
    if sure > 1:
        total, k = total + sure - 1, sure
    while k * step < mean + 6 * deviation:
        above = (k * step + 0.5 - mean) / deviation
        total += math.erfc(above / math.sqrt(2)) / 2
        k += 1
    return total


def chances(num_experts: int, top_k: int, routing: str = "random") -> list[float]:
    """q_e of every expert, the most popular first. Raises ``ValueError`` for a routing that
    `ROUTINGS` lacks."""
    E, K = num_experts, top_k
    expect(
        routing in ROUTINGS, "chances", "routing", f"one of {', '.join(ROUTINGS)}", repr(routing)
    )
    if routing == "one_expert":
        return [1.0] + [(K - 1) / (E - 1)] * (E - 1) if E > 1 else [1.0]
    if routing == "zipf":
        return _drawn([rank**-ZIPF for rank in range(1, E + 1)], K)
    return [K / E] * E


def _drawn(weights: Sequence[float], count: int) -> list[float]:
    """The chance of each to be among `count` drawn without replacement: of exponential clocks of
    these rates, those that ring before the time at which `count` have, on average."""
    if count == len(weights):
        return [1.0] * count
    low, high = 0.0, 1.0
    while sum(1 - math.exp(-high * w) for w in weights) < count:
        high *= 2
    for _ in range(60):
        time = (low + high) / 2
        if sum(1 - math.exp(-time * w) for w in weights) < count:
            low = time
        else:
            high = time
    return [1 - math.exp(-high * w) for w in weights]
