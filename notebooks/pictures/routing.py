"""Tokens on their way to experts. Each function draws one figure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from matplotlib.figure import Figure

from .boxes import arrow, canvas, cell, heat_map
from .charts import bars
from .paper import BLUE, INK, RED, colour_of, panels


def scores(named: dict[str, Sequence[float]], chosen: Collection[int]) -> Figure:
    """A panel of bars per name, one bar per expert; those of the chosen are blue."""
    figure, all_axes = panels(9.0, 2.5, 1, len(named))
    for axes, (name, values) in zip(all_axes, named.items(), strict=True):
        experts = range(len(values))
        colours = [BLUE if e in chosen else INK for e in experts]
        bars(axes, experts, values, name, colours=colours, form="{:.2f}", lying=False)
        axes.set_xlabel("expert")
    return figure


def groups(
    values: Any, group_scores: Sequence[float], kept: Collection[int], chosen: Collection[int],
    best: Collection[int],
) -> Figure:  # fmt: skip
    """Scores (groups, experts of a group). A dot is a chosen expert, a cross one of the best that
    isn't chosen."""
    figure, axes = panels(9.0, 2.9)
    heat_map(axes, values, "expert of the group", "group", form=None, smallest=0.5, largest=1.0)
    size = len(values[0])
    for g, score in enumerate(group_scores):
        is_kept = g in kept
        note = f"{score:.2f}  {'kept' if is_kept else 'out'}"
        axes.text(size, g, note, va="center", weight="bold" if is_kept else "normal")
    for experts, mark, big in ((chosen, "●", 13), (set(best) - set(chosen), "×", 15)):
        look = {"ha": "center", "va": "center", "color": RED, "fontsize": big}
        for e in experts:
            axes.text(e % size, e // size, mark, **look)
    axes.set_xlim(-0.5, size + 5)
    axes.set_xticks(range(0, size, 5))
    return figure


def exchange(ids: Sequence[Sequence[Sequence[int]]], experts_of: Sequence[Sequence[int]]) -> Figure:
    """ids[rank][token]: its experts. An arrow leads from each token to each of its experts."""
    figure, axes = panels(8.2, 3.2)
    canvas(axes, -0.3, 9.5 * len(ids) - 2.4, -1.0, 5.6)
    start, end = {}, {}
    for rank, tokens in enumerate(ids):
        left = 9.5 * rank
        for t in range(len(tokens)):
            cell(axes, left + 2.4 * t, 4, f"token {t}", colour_of(rank), width=1.9, size=8)
            start[rank, t] = left + 2.4 * t + 0.95
        for n, e in enumerate(experts_of[rank]):
            cell(axes, left + 3.6 * n, 0, f"expert {e}", width=3.2)
            end[e] = left + 3.6 * n + 1.6
        axes.text(left + 3.4, 5.2, f"tokens of rank {rank}", ha="center")
        axes.text(left + 3.4, -0.3, f"experts of rank {rank}", ha="center", va="top")
    arrows = [(rank, t, e) for rank, of in enumerate(ids) for t, es in enumerate(of) for e in es]
    met = {e: [one for one in arrows if one[2] == e] for e in end}  # heads beside each other
    for rank, t, e in arrows:
        aside = 0.25 * (met[e].index((rank, t, e)) - (len(met[e]) - 1) / 2)
        arrow(axes, (start[rank, t], 3.95), (end[e] + aside, 1.05), colour_of(rank))
    return figure
