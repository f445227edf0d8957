"""Pictures made of boxes: rows of them, tables, schedules, and arrows in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from .paper import INK, on


def cell(
    axes: Axes, x: float, y: float, text: Any = "", colour: Any = None,
    width: float = 1.0, height: float = 1.0, hatch: str = "", size: float = 9,
) -> None:  # fmt: skip
    """A box with its lower left corner at x, y. Without a colour it is empty."""
    box = Rectangle(
        (x, y),
        width,
        height,
        facecolor=colour or "none",
        edgecolor=INK,
        linewidth=0.8,
        hatch=hatch,
        clip_on=False,  # the outermost boxes have their whole border
    )
    axes.add_patch(box)
    if text != "":
        axes.text(
            x + width / 2, y + height / 2, str(text), ha="center", va="center", fontsize=size,
            color=on(colour) if colour else INK,
        )  # fmt: skip


def row(
    axes: Axes, y: float, texts: Sequence[Any], colours: Sequence[Any] | None = None,
    label: str = "", x: float = 0.0, **options: Any,
) -> None:  # fmt: skip
    """Boxes side by side with a label to their left."""
    for place, text in enumerate(texts):
        cell(axes, x + place, y, text, colours[place] if colours else None, **options)
    if label:
        axes.text(x - 0.25, y + 0.5, label, ha="right", va="center")


def canvas(axes: Axes, left: float, right: float, bottom: float, top: float) -> None:
    """Turn axes into paper for boxes: equal units, no frame."""
    axes.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    axes.axis("off")


def heat_map(
    axes: Axes, values: Any, x_label: str, y_label: str, *,
    form: str | None = "{:.2f}", largest: float | None = None, cmap: str = "viridis",
    smallest: float = 0.0, blank: float | None = None,
) -> None:  # fmt: skip
    """A matrix as coloured cells, the numbers in them as `form` says; `blank` values stay empty."""
    values = [[float(v) for v in line] for line in values]
    top = max(map(max, values)) if largest is None else largest
    colours = colormaps[cmap]
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            share = min(max((value - smallest) / ((top - smallest) or 1.0), 0.0), 1.0)
            empty = value == blank or math.isnan(value)
            text = "" if form is None or empty else form.format(value)
            cell(axes, x - 0.5, y - 0.5, text, None if empty else colours(share), size=8)
    axes.set(xlim=(-0.5, len(values[0]) - 0.5), ylim=(len(values) - 0.5, -0.5))
    axes.set(xlabel=x_label, ylabel=y_label)
    if len(values[0]) <= 16:
        axes.set_xticks(range(len(values[0])))
    if len(values) <= 16:
        axes.set_yticks(range(len(values)))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def table(
    axes: Axes, words: Sequence[Sequence[str]], columns: Sequence[str], lines: Sequence[str],
    colours: dict[str, Any],
) -> None:  # fmt: skip
    """Words in cells, each word of its own colour."""
    for y, line in enumerate(words):
        for x, word in enumerate(line):
            cell(axes, x - 0.5, y - 0.5, word, colours.get(word))
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(lines) - 0.5, -0.5))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(lines)), lines)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def gantt(axes: Axes, jobs: Sequence[tuple[int, float, float, Any, str]], x_label: str) -> None:
    """Jobs as bars in their worker's line: (worker, start, end, colour, text)."""
    for worker, start, end, colour, text in jobs:
        cell(axes, start, worker - 0.4, text, colour, width=end - start, height=0.8, size=8)
    workers = max(job[0] for job in jobs) + 1
    axes.set(xlim=(0, max(job[2] for job in jobs) * 1.02), ylim=(workers - 0.4, -0.6))
    axes.set_yticks(range(workers), [f"worker {n}" for n in range(workers)])
    axes.set_xlabel(x_label)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK
) -> None:
    """From one point to another."""
    axes.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.2, "shrinkA": 1, "shrinkB": 1},
    )
