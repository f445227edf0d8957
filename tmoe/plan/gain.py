"""What placing experts by their load gains, as the cost model predicts it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..bench.cost_model import RankLayer, fitted, predict_with
from ..bench.loads import chances
from ..bench.tables import Grid, Row, us_text
from ..checks import expect
from ..parallel.balance import balance, rank_loads
from ..parallel.placement import Placement
from ..shapes import MoEShape
from .layouts import MEASURED, roof

SEEDS = 5  # of which experts are the popular ones


def busiest_us(
    shape: MoEShape, tokens: int, placement: Placement, popular: Sequence[float], scheme: str
) -> float:
    """Predicted time of the rank that takes longest; tokens of all ranks together."""
    layer = RankLayer(shape, tokens, scheme, "zipf", ep=placement.num_ranks)
    share = [chance / len(s) for chance, s in zip(popular, placement.expert_slots, strict=True)]
    loads = (layer.load_of([share[e] for e in own]) for own in placement.ranks)
    limits = roof(MEASURED, scheme)
    return max(predict_with(fitted()[scheme], layer, limits, load).us for load in loads)


def placement_gain(
    shape: MoEShape,
    ep: int,
    tokens: Sequence[int],
    *,
    scheme: str = "bf16",
    routing: str = "zipf",
    redundant: Sequence[int] = (0, 1, 2),
) -> Grid:
    """The busiest rank's load over the mean, and its predicted time, for experts in order and
    placed by their load without and with copies. Which experts are popular is drawn five times;
    the numbers are means. tokens: of each rank."""
    expect(scheme in fitted(), "placement_gain", "scheme", f"one of {', '.join(fitted())}", scheme)
    drawn = [chances(shape.num_experts, shape.top_k, routing) for _ in range(SEEDS)]
    for seed, popular in enumerate(drawn):
        random.Random(seed).shuffle(popular)
    kinds = {"in order": None, **{f"by load, {r} redundant": r for r in redundant}}
    rows = []
    for name, copies in kinds.items():
        placed = [
            (
                Placement.contiguous(shape.num_experts, ep)
                if copies is None
                else balance(popular, ep, redundant=copies),
                popular,
            )
            for popular in drawn
        ]
        even = [max(loads) * ep / sum(loads) for loads in (rank_loads(p, q) for q, p in placed)]
        texts = [name, f"{sum(even) / SEEDS:.2f}"]
        for count in tokens:
            times = [busiest_us(shape, count * ep, q, p, scheme) for q, p in placed]
            texts.append(us_text(sum(times) / SEEDS))
        rows.append(Row(tuple(texts)))
    title = f"{shape.name}, {scheme}, {routing} routing, EP {ep}: µs of the busiest rank, predicted"
    columns = ("placement", "load over mean", *(f"T = {count} per rank" for count in tokens))
    return Grid(title, columns, tuple(rows))
