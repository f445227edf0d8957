"""Pictures of results: the roofline, and time over the number of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .records import ROOFLINE, Cell
from .roofline import ROOFS, Roof

INK, FAINT, PAPER = "#1f2328", "#8c959f", "#ffffff"
# Okabe and Ito's palette, which every kind of colour vision tells apart, with a marker for each.
OURS = "#d55e00"
PEERS = {
    "vllm": ("#0072b2", "s"),
    "triton_kernels": ("#009e73", "^"),
    "grouped_mm": ("#cc79a7", "D"),
    "torch_grouped_mm": ("#56b4e9", "v"),
    "flashinfer": ("#e69f00", "P"),
    "flashinfer_cutlass": ("#e69f00", "h"),
    "flashinfer_trtllm": ("#009e73", "*"),
    "deepgemm": ("#cc79a7", "D"),
    "vllm_cutlass": ("#56b4e9", "v"),
    "marlin": ("#999999", "X"),
    "sonicmoe": ("#999999", "p"),
}
_STYLE: Any = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "svg.fonttype": "none",
    "svg.hashsalt": "tmoe",
}
_MOST_COLUMNS = 4


def draw(named: Mapping[str, Sequence[Cell]], device: str) -> dict[str, Figure]:
    """The pictures that `picture_cells` names."""
    return {
        name: roofline(cells, device) if name.startswith(ROOFLINE) else time_over_tokens(cells)
        for name, cells in named.items()
    }


def save_png(figure: Figure, path: Path) -> None:
    """On white paper, which is readable in a light page and in a dark one."""
    with rc_context(_STYLE):
        figure.savefig(
            path,
            dpi=130,
            facecolor=PAPER,
            metadata={"Software": None},
            pil_kwargs={"optimize": True},
        )


def as_svg(figure: Figure) -> str:
    """To stand inside a page, on whose paper it lies and with whose ink it is drawn."""
    out = StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with rc_context(_STYLE):
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    return (
        text.replace(INK, "var(--ink)")
        .replace(FAINT, "var(--faint)")
        .replace(PAPER, "var(--paper)")
    )


def time_over_tokens(cells: Sequence[Cell]) -> Figure:
    """One layer: tmoe, every peer, the floor and the prediction."""
    cells = sorted(cells, key=lambda cell: cell.tokens)
    with rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        tokens = [cell.tokens for cell in cells]
        floor = [cell.floor_us for cell in cells]
        bottom = min(floor) / 1.6
        axes.fill_between(tokens, floor, bottom, color=FAINT, alpha=0.18, lw=0)
        axes.plot(tokens, floor, color=FAINT, lw=1, label="floor")
        if all(cell.predicted_us is not None for cell in cells):
            predicted = [cell.predicted_us or 0.0 for cell in cells]
            axes.plot(tokens, predicted, color=INK, ls=":", lw=1.2, label="predicted")
        for peer in sorted({peer for cell in cells for peer in cell.peers}):
            have = [cell for cell in cells if peer in cell.peers]
            colour, marker = PEERS.get(peer, (FAINT, "o"))
            axes.plot(
                [cell.tokens for cell in have], [cell.peers[peer] for cell in have],
                color=colour, marker=marker, ms=4.5, lw=1.1, label=peer,
            )  # fmt: skip
        ours = [cell.us for cell in cells]
        axes.plot(tokens, ours, color=OURS, marker="o", ms=5.5, lw=2.2, label="tmoe")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(bottom=bottom)
        few = len(tokens) <= 10  # otherwise every second one has its number
        axes.set_xticks(tokens, [str(T) if few or n % 2 == 0 else "" for n, T in enumerate(tokens)])
        axes.minorticks_off()
        _plain_numbers(axes, "y")
        axes.set(xlabel="tokens", ylabel="µs per call")
        axes.set_title(f"{cells[0].shape}, {cells[0].scheme}", loc="left", weight="bold")
        axes.grid(color=FAINT, alpha=0.25, lw=0.6)
        lines, names = axes.get_legend_handles_labels()
        axes.legend(lines[::-1], names[::-1], frameon=False, loc="upper left", handlelength=2.4)
    return figure


def roofline(cells: Sequence[Cell], device: str) -> Figure:
    """A panel per layer: flops per byte against TFLOP/s, below the roof where it is known."""
    shapes = list(dict.fromkeys(cell.shape for cell in cells))
    columns = min(_MOST_COLUMNS, len(shapes))
    lines = math.ceil(len(shapes) / columns)
    roof = _roof(cells, device)
    left = min(cell.intensity for cell in cells) / 2
    right = max(cell.intensity for cell in cells) * 6
    if roof is not None:
        right = max(right, 4e3 * roof.tflops / roof.gbs)
    low = min(cell.tflops for cell in cells) / 2.5
    high = max([cell.tflops for cell in cells] + ([roof.tflops] if roof else [])) * 2.2
    with rc_context(_STYLE):
        size = (0.9 + 2.6 * columns, 0.9 + 2.35 * lines)
        figure = Figure(figsize=(max(size[0], 4.2), size[1]), layout="constrained")
        panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        for place, axes in enumerate(panels.flat):
            if place >= len(shapes):
                axes.set_visible(False)
                continue
            axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, high))
            if place + columns >= len(shapes):  # nothing stands below it
                axes.tick_params(labelbottom=True)
            if roof is not None:
                _draw_roof(axes, roof, left, right, labelled=place == 0)
            _draw_points(axes, [cell for cell in cells if cell.shape == shapes[place]])
            axes.set_title(shapes[place], loc="left", fontsize=9, weight="bold")
            axes.grid(color=FAINT, alpha=0.22, lw=0.6)
            axes.minorticks_off()
            _plain_numbers(axes, "x")
            _plain_numbers(axes, "y")
        figure.supxlabel("flops per necessary byte", fontsize=9)
        figure.supylabel("TFLOP/s", fontsize=9)
        figure.suptitle(
            f"{device}, {cells[0].scheme}; the numbers are tokens", x=0.01, ha="left", fontsize=10
        )
    return figure


def _roof(cells: Sequence[Cell], device: str) -> Roof | None:
    """The recorded roof, by which dtype the floor was computed: arithmetic over time."""
    for (name, _), roof in ROOFS.items():
        floors = [max(c.tflops / roof.tflops, c.gbs / roof.gbs) * c.us for c in cells]
        same = all(
            math.isclose(f, c.floor_us, rel_tol=0.01) for f, c in zip(floors, cells, strict=True)
        )
        if name == device and same:
            return roof
    return None


def _draw_roof(axes: Axes, roof: Roof, left: float, right: float, *, labelled: bool) -> None:
    ridge = 1e3 * roof.tflops / roof.gbs
    xs, ys = [left, ridge, right], [left * roof.gbs / 1e3, roof.tflops, roof.tflops]
    axes.plot(xs, ys, color=INK, lw=1.1)
    axes.fill_between(xs, ys, 1e6, color=FAINT, alpha=0.16, lw=0)
    if labelled:
        peak = f"{roof.tflops:.0f} TFLOP/s"
        axes.text(right / 1.15, roof.tflops * 1.12, peak, ha="right", va="bottom", fontsize=7.5)
        x = left * 1.25
        axes.text(
            x, x * roof.gbs / 1e3 * 1.5, f"{roof.gbs / 1e3:.2f} TB/s", fontsize=7.5, ha="left",
            va="bottom", rotation=_angle(axes), rotation_mode="anchor",
        )  # fmt: skip


def _angle(axes: Axes) -> float:
    """Degrees of a line of slope 1 in a panel of 2.2 by 1.75 inches with logarithmic axes."""
    decades = [math.log10(high / low) for low, high in (axes.get_xlim(), axes.get_ylim())]
    return math.degrees(math.atan2(1.75 / decades[1], 2.2 / decades[0]))


def _draw_points(axes: Axes, cells: Sequence[Cell]) -> None:
    cells = sorted(cells, key=lambda cell: cell.tokens)
    xs, ys = [cell.intensity for cell in cells], [cell.tflops for cell in cells]
    axes.plot(xs, ys, color=OURS, lw=1, marker="o", ms=4.5, zorder=3)
    last: tuple[float, float] | None = None
    for cell, x, y in zip(cells, xs, ys, strict=True):
        spot = (math.log10(x), math.log10(y))
        # Where two points nearly meet, one label is enough: that of the first.
        if last is not None and math.dist(spot, last) < 0.22:
            continue
        last = spot
        axes.annotate(
            str(cell.tokens), (x, y), xytext=(5, -4), textcoords="offset points", fontsize=7.5,
            ha="left", va="top",
        )  # fmt: skip


def _plain_numbers(axes: Axes, which: str) -> None:
    """1000 instead of 10³; between them 200 and 500, where less than two powers of ten are seen."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = map(math.log10, axis.get_view_interval())
    if math.floor(high) <= math.ceil(low):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1e5 else f"{value:.0e}")
