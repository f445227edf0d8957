"""Charts: bars, lines, and numbers on a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from .paper import BLUE, INK, ORANGE, colour_of, on


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
        axes.locator_params(axis="x", nbins=5)
    else:
        axes.set_xticks(places, names)
        axes.set_ylabel(unit)
        axes.margins(y=0.16)


def bar_pairs(
    axes: Axes, names: Sequence[str], named: dict[str, Sequence[float]], unit: str,
    *, form: str = "{:.2f}", where: str = "lower right",
) -> None:  # fmt: skip
    """Lying bars in groups: for each name one per entry of `named`, its value at the end."""
    height = 0.78 / len(named)
    for number, (label, values) in enumerate(named.items()):
        shift = (number - (len(named) - 1) / 2) * height
        places = [place + shift for place in range(len(names))]
        look = {"color": colour_of(number), "edgecolor": INK, "linewidth": 0.6}
        drawn = axes.barh(places, values, height=height, label=label, **look)
        texts = [form.format(value) for value in values]
        axes.bar_label(drawn, texts, padding=3, color=INK, fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlabel(unit)
    axes.legend(loc=where)


def stacked_bars(axes: Axes, named: dict[str, dict[str, float]], unit: str) -> None:
    """One lying bar per name, made of parts that follow each other; a colour is a part."""
    number = 0
    for place, parts in enumerate(named.values()):
        left = 0.0
        for label, value in parts.items():
            colour = colour_of(number)
            axes.barh(place, value, left=left, color=colour, edgecolor=INK, label=label)
            middle = {"ha": "center", "va": "center", "color": on(colour)}
            axes.text(left + value / 2, place, f"{value:.2f}", **middle)
            left += value
            number += 1
    axes.set_yticks(range(len(named)), named)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05))


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


def curves(axes: Axes, xs: Any, named: dict[str, Any], x_label: str, y_label: str) -> None:
    """A smooth line per name. The last one is thick and grey, the others are dashed."""
    *others, last = named.items()
    for number, (name, ys) in enumerate(others):
        axes.plot(xs, ys, color=colour_of(number), lw=1.4, ls="--", label=name)
    axes.plot(xs, last[1], color=INK, lw=2, label=last[0])
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend()


def number_line(axes: Axes, numbers: Any, label: str, borders: Any = ()) -> None:
    """Numbers as lines across the axis; borders between them shorter and dashed."""
    axes.vlines(list(numbers), 0, 1, color=BLUE, lw=1.4)
    if borders:
        axes.vlines(list(borders), 0, 0.45, color=ORANGE, lw=1, ls="--")
    axes.set_xlabel(label)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def roofline(
    axes: Axes, tflops: float, gbs: float, named: dict[str, Sequence[tuple[float, float, int]]],
    numbered: str,
) -> None:  # fmt: skip
    """The two limits, and points (flops per byte, TFLOP/s, tokens) per name; the tokens stand at
    the points of one name, `numbered`."""
    ridge = 1000 * tflops / gbs
    axes.plot([0.5, ridge, 4000], [gbs / 2000, tflops, tflops], color=INK, lw=2)
    for number, (name, points) in enumerate(named.items()):
        xs, ys, tokens = zip(*points, strict=True)
        colour = colour_of(number)
        axes.plot(xs, ys, color=colour, marker="os^"[number], lw=1, label=name)
        for x, y, count in zip(xs, ys, tokens, strict=True) if name == numbered else ():
            spot = {"xytext": (6, -11), "textcoords": "offset points", "fontsize": 8}
            axes.annotate(f"{count}", (x, y), color=colour, **spot)
    axes.set(xscale="log", yscale="log", xlabel="flops per byte", ylabel="TFLOP/s")
    axes.set_ylim(1.6, 1500)
    axes.text(70, 0.1 * gbs, f"{gbs / 1000:.2f} TB/s", rotation=37, ha="right", va="bottom")
    axes.text(700, tflops * 1.07, f"{tflops:.0f} TFLOP/s", ha="center", va="bottom")
    axes.legend(loc="lower right")
