"""How many experts get tokens, and how many rows are computed for them, before anything is routed.

A token draws K different experts; q_e is the chance that e is among them, so that sum(q_e) = K.
Of T tokens, expert e gets T q_e rows on average, and at least one with chance 1 - (1 - q_e)^T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..checks import expect
from .shapes import ROUTINGS, ZIPF

LOWEST, HIGHEST = 16, 128  # rows of a tile: the power of two above the mean, within these


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
        if even:
            touched = [min(1.0, T * q) for q in chances]
        else:
            touched = [1 - (1 - q) ** T for q in chances]
        tile = _tile_height(rows / E)
        # An expert's last tile is half full on average; high tiles halve their tails.
        waste = tile / 4 if tile == HIGHEST else tile / 2
        padded = 0.0
        for q, used in zip(chances, touched, strict=True):
            if used > 0:
                mean = T * q / used  # rows, given that there are any
                padded += used * (tile if mean < tile / 2 else mean + waste)
        return cls(rows, sum(touched), max(rows, padded))


def _tile_height(rows_per_expert: float) -> int:
    power = math.ceil(math.log2(max(1.0, rows_per_expert)))
    return int(min(HIGHEST, max(LOWEST, 2**power)))


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
