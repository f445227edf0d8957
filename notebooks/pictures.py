"""Pictures for the notebooks: one look, readable on white and on black paper.

Backgrounds are transparent. Lines and letters are of a grey that has the same contrast, 4.3 : 1,
with white and with the dark pages of notebooks; letters on a coloured cell are black or white.
Colours are those of Okabe and Ito, which all kinds of colour vision tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import lesson

INK = "#797979"
COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8f7a1d", "#7a5ac8",
)  # fmt: skip
BLUE, ORANGE, GREEN, RED, PINK, SKY, OLIVE, VIOLET = COLOURS
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "legend.fontsize": 9,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.color": INK,
}

rcParams.update(STYLE)


def panels(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, Any]:
    """A figure of so many inches and its axes: one, or an array. options: of `Figure.subplots`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def show(figure: Figure, words: str) -> None:
    """Display a figure; `words` say what is to be seen, for whoever can't see it."""
    out = BytesIO()
    figure.savefig(out, format="png", dpi=110, transparent=True, metadata={"Software": None})
    lesson.display({"image/png": out.getvalue(), "text/plain": f"[picture: {words}]"})


def colour_of(number: int) -> str:
    """One colour per expert, program or worker."""
    return COLOURS[number % len(COLOURS)]


def on(colour: Any) -> str:
    """Black or white, whichever is read better on this colour."""
    red, green, blue = (
        c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)
    )
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"


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


def bars(
    axes: Axes, names: Sequence[str], values: Sequence[float], unit: str, *,
    colours: Sequence[str] | str = BLUE, form: str = "{:.3g}", lying: bool = True,
) -> None:  # fmt: skip
    """One bar per name, its value written at the end."""
    places = range(len(names))
    draw = axes.barh if lying else axes.bar
    drawn = draw(places, values, color=colours, edgecolor=INK, linewidth=0.6)
    axes.bar_label(drawn, [form.format(v) for v in values], padding=3, color=INK, fontsize=9)
    if lying:
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.margins(x=0.16)
    else:
        axes.set_xticks(places, names)
        axes.set_ylabel(unit)
        axes.margins(y=0.16)


def lines(
    axes: Axes, xs: Sequence[float], named: dict[str, Sequence[float]], x_label: str, y_label: str,
    *, powers: bool = False,
) -> None:  # fmt: skip
    """A line with markers per name. powers: x goes by powers of two."""
    for number, (name, ys) in enumerate(named.items()):
        marker = "os^Dvp*h"[number % 8]
        axes.plot(xs, ys, color=colour_of(number), marker=marker, ms=5, lw=1.6, label=name)
    if powers:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(xs), [f"{x:g}" for x in xs])
        axes.minorticks_off()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(color=INK, alpha=0.25, lw=0.6)
    if len(named) > 1:
        axes.legend()


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
