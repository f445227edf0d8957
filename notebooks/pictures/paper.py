"""The look of all pictures: readable on white and on black paper.

Backgrounds are transparent. Lines and letters are of a grey that has the same contrast, 4.3 : 1,
with white and with the dark pages of notebooks; letters on a coloured cell are black or white.
Colours are those of Okabe and Ito, which all kinds of colour vision tell apart.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

from matplotlib import rcParams
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

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
