"""Products of matrices, and the memory that they take. Each function draws one figure."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from .boxes import arrow, canvas, cell
from .paper import BLUE, GREEN, INK, ORANGE, colour_of, on, panels


def tile_step() -> Figure:
    """A step of a tile's loop: a block of a, a block of w, and the sums that they go to."""
    figure, axes = panels(7.6, 3.4)
    canvas(axes, -0.5, 24.5, -1.2, 10.0)
    for y in range(4):
        for x in range(12):
            cell(axes, x, y, "", BLUE if 4 <= x < 8 else None)
        for x in range(6):
            cell(axes, 14 + x, y, "", GREEN)
            cell(axes, 14 + x, 5.4 + y, "", ORANGE)  # w, drawn transposed: depth goes down
    axes.text(6, -0.3, "a: block_m rows, D deep; this step in blue", ha="center", va="top")
    axes.text(17, -0.3, "sums of the tile", ha="center", va="top")
    axes.text(20.4, 7.4, "w: this step,\nblock_d deep,\nblock_n columns", va="center")
    arrow(axes, (8.2, 4.6), (11.9, 4.6))
    axes.text(8, 4.6, "steps of block_d", ha="right", va="center")
    return figure


DEEP, WIDE = 5.0, (1.9, 1.35)  # D to the right, N into the page
FACES = {  # corners, in shares of D, of N and of the rows
    "front": ((0, 0, 0), (1, 0, 0), (1, 0, 1), (0, 0, 1)),
    "top": ((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)),
    "side": ((1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 0, 1)),
}
NAMES = {"front": "x", "top": "w", "side": "y"}  # (S, D), (N, D) and (S, N)
PRODUCTS = {
    "side": "y = x · wᵀ\nsum over D",
    "front": "dx = dy · w\nsum over N",
    "top": "dw = dyᵀ · x\nsum over the expert's rows",
}


def three_products(counts: Sequence[int]) -> Figure:
    """A box per expert, counts[e] rows high. In each panel two faces are read, and along the third
    direction everything is added up to the solid one."""
    figure, three = panels(9.4, 4.6, 1, 3)
    for axes, (result, title) in zip(three, PRODUCTS.items(), strict=True):
        bottom = _boxes(axes, counts, result)
        canvas(axes, -1.3, DEEP + WIDE[0] + 0.3, bottom - 1.0, WIDE[1] + 0.3)
        axes.set_title(title)
        if result == "side":
            arrow(axes, (0.2, bottom - 0.5), (DEEP - 0.2, bottom - 0.5))
        if result == "front":
            start = (DEEP + 0.4, bottom - 0.1)
            arrow(axes, start, (start[0] + 0.9 * WIDE[0], start[1] + 0.9 * WIDE[1]))
    return figure


def _boxes(axes: Axes, counts: Sequence[int], result: str) -> float:
    """Draw them from the top down; where the last one ends."""
    backward, y = result != "side", 0.0
    for e, count in enumerate(counts):
        for face, corners in FACES.items():
            points = [(DEEP * d + WIDE[0] * n, y + WIDE[1] * n - count * s) for d, n, s in corners]
            solid = face == result and count > 0
            paint = to_rgba(colour_of(e), 1.0 if solid else 0.2 if count else 0.0)
            axes.add_patch(Polygon(points, facecolor=paint, edgecolor=INK, lw=0.8))
            word = f"d{NAMES[face]}" if backward and face in (result, "side") else NAMES[face]
            if count == 0:  # nothing but its weights; the sum of nothing is 0
                word = "" if face != "top" else "0" if result == "top" else "w"
            xs, ys = zip(*points, strict=True)
            ink = on(colour_of(e)) if solid else INK
            axes.text(sum(xs) / 4, sum(ys) / 4, word, ha="center", va="center", color=ink)
        if result == "top" and count:
            arrow(axes, (-0.4, y - 0.05), (-0.4, y - count + 0.05), colour_of(e))
        y -= count + WIDE[1] + 0.35
    return y + WIDE[1] + 0.35


def backward_memory(I: int, H: int) -> Figure:
    """What stands in the three pieces of memory of a backward, step by step; heights are numbers
    per row."""
    figure, axes = panels(9.4, 3.3)
    steps = (
        "forward", "dy · down", "activation", "d_h · gate_up", "copy dy", "d_down", "copy x",
        "d_gate_up",
    )  # fmt: skip
    total = 3 * I + H
    held = {
        "2 I": (2 * I, (("h: gate and up", 0, 2), ("d_h", 2, 8))),
        "I": (I, (("g", 1, 2), ("weight · activated", 2, 6))),
        "H": (H, (("rows of dx", 3, 4), ("dy, copied", 4, 6), ("x, copied", 6, 8))),
    }
    y, ticks = 0.0, []
    for number, (size, parts) in enumerate(held.values()):
        height = 4 * size / total
        for text, begin, end in parts:
            cell(axes, begin, y, text, colour_of(number), width=end - begin, height=height)
        ticks.append(y + height / 2)
        y += height
    axes.set(xlim=(0, len(steps)), ylim=(0, y), ylabel="numbers per row")
    axes.set_xticks([n + 0.5 for n in range(len(steps))], steps)
    axes.set_yticks(ticks, held)
    axes.tick_params(length=0)
    return figure
