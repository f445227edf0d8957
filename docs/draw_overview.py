"""Draws the picture of README.md: `python docs/draw_overview.py` writes docs/images/overview.svg.

Four tokens on their way through the kernels, with the experts that `tmoe.route` chooses and the
rows as `tmoe.kernels.sort` orders them; below, recorded times. The picture carries its numbers as
text, so that a test can tell whether it still shows the truth.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

import tmoe
from tmoe.bench.records import read_cells, read_recorded, read_results
from tmoe.kernels.sort import sort_ref

DOCS = Path(__file__).parent
PATH = DOCS / "images" / "overview.svg"
RECORD = DOCS.parent / "bench" / "results" / "h200_beside.json"
LOGITS = [[2.0, 1.6, -1.0], [-0.5, 1.0, 1.5], [0.2, -1.0, 1.2], [1.4, 0.9, -0.3]]
E, K = 3, 2

# From the palette of Okabe and Ito, which all kinds of colour vision tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73")
INK, PALE, OURS = "#222222", "#C9CDD2", "#D55E00"


@dataclass(frozen=True)
class Shown:
    """What the picture shows."""

    ids: list[list[int]]  # of each token, its experts
    weights: list[list[float]]
    row_to_slot: list[int]  # rows in the order of their experts; a slot is token · K + k
    times: dict[str, float]  # of peers: geometric mean of their time over ours
    cells: int
    layers: int
    date: str
    device: str


def shown() -> Shown:
    """The numbers of the picture."""
    weights, ids = tmoe.route(torch.tensor(LOGITS), tmoe.Routing(E, K, "Renormalize"))
    _, row_to_slot, _ = sort_ref(ids, num_experts=E)
    results = read_results([RECORD])
    cells = [c for c in read_cells(results, read_recorded(), "triton") if c.peers]
    peers = ("vllm", "triton_kernels", "grouped_mm")
    return Shown(
        ids.tolist(),
        [[round(w, 2) for w in row] for row in weights.tolist()],
        row_to_slot.tolist(),
        {
            p: round(geometric_mean([c.peers[p] / c.us for c in cells if p in c.peers]), 2)
            for p in peers
        },
        len(cells),
        len({c.shape for c in cells}),
        results["datetime"][:10],
        results["machine_info"]["device"],
    )


def draw(picture: Shown) -> Figure:
    """The way of the data above, bars below."""
    figure = Figure(figsize=(10, 5.2), dpi=100, facecolor="white")
    _draw_way(figure.add_axes((0.01, 0.28, 0.98, 0.71)), picture)
    _draw_times(figure.add_axes((0.19, 0.02, 0.79, 0.2)), picture)
    return figure


def _cell(axes: Axes, x: float, y: float, text: str, colour: str, width: float = 6) -> None:
    axes.add_patch(Rectangle((x, y), width, 3, facecolor=colour, edgecolor="white", linewidth=1.5))
    dark = colour in (COLOURS[0], COLOURS[2])
    middle = (x + width / 2, y + 1.4)
    axes.text(*middle, text, ha="center", va="center", fontsize=9, color="white" if dark else INK)


def _join(axes: Axes, left: tuple[float, float], right: tuple[float, float], colour: str) -> None:
    """A line that leaves and arrives level."""
    t = torch.linspace(0, 1, 25)
    y = left[1] + (right[1] - left[1]) * (3 * t**2 - 2 * t**3)
    x = left[0] + (right[0] - left[0]) * t
    axes.plot(x.tolist(), y.tolist(), color=colour, linewidth=1.4, alpha=0.8, zorder=0)


def _draw_way(axes: Axes, picture: Shown) -> None:
    axes.set(xlim=(0, 113), ylim=(-4.5, 37))
    axes.axis("off")
    S = len(picture.row_to_slot)
    token_y = [27 - 8 * t for t in range(len(picture.ids))]
    row_y = [29 - 3.6 * row - 0.9 * _expert(picture, row) for row in range(S)]
    heads = ((3, "tokens", "x (T, H)"), (19, "1  route", "K experts each"))
    heads += ((45, "2  sort", "by expert"), (71, "3  grouped GEMM", "gate · up · act, then down"))
    for x, title, below in (*heads, (103, "4  combine", "y (T, H)")):
        axes.text(x + 3, 35, title, ha="center", fontsize=11, weight="bold", color=INK)
        axes.text(x + 3, 32.9, below, ha="center", fontsize=8, color="#555555")
    for t, y in enumerate(token_y):
        _cell(axes, 3, y, str(t), PALE)
        _cell(axes, 103, y, str(t), PALE)
        for k, expert in enumerate(picture.ids[t]):
            place = y + 2.2 - 4.4 * k
            _cell(axes, 17, place, f"e{expert}", COLOURS[expert], width=5)
            words = f"{picture.weights[t][k]:.2f}"
            axes.text(22.6, place + 1.4, words, va="center", fontsize=8, color=INK)
            _join(axes, (9, y + 1.5), (17, place + 1.5), PALE)
    for row, slot in enumerate(picture.row_to_slot):
        t, k = divmod(slot, K)
        expert, y = _expert(picture, row), row_y[row]
        _join(axes, (27, token_y[t] + 3.7 - 4.4 * k), (45, y + 1.5), COLOURS[expert])
        _cell(axes, 45, y, str(t), COLOURS[expert])
        _join(axes, (51, y + 1.5), (61, y + 1.5), COLOURS[expert])
        _cell(axes, 86, y, "", COLOURS[expert], width=4)
        _join(axes, (90, y + 1.5), (103, token_y[t] + 1.5), COLOURS[expert])
    for expert in range(E):
        mine = [y for row, y in enumerate(row_y) if _expert(picture, row) == expert]
        for x, words in ((61, "gate·up"), (74, "down")):
            box = FancyBboxPatch(
                (x + 0.4, min(mine) + 0.2), 9.2, max(mine) - min(mine) + 2.6,
                boxstyle="round,pad=0,rounding_size=0.8", facecolor="white",
                edgecolor=COLOURS[expert], linewidth=1.8,
            )  # fmt: skip
            axes.add_patch(box)
            middle = (min(mine) + max(mine) + 3) / 2
            axes.text(
                x + 5, middle, f"expert {expert}\n{words}" if len(mine) > 1 else words,
                ha="center", va="center", fontsize=8, color=INK,
            )  # fmt: skip
        for y in mine:
            _join(axes, (71, y + 1.5), (74, y + 1.5), COLOURS[expert])
            _join(axes, (84, y + 1.5), (86, y + 1.5), COLOURS[expert])


def _expert(picture: Shown, row: int) -> int:
    t, k = divmod(picture.row_to_slot[row], K)
    return picture.ids[t][k]


def _draw_times(axes: Axes, picture: Shown) -> None:
    times = {"tmoe": 1.0, **picture.times}
    names = {"vllm": "vLLM", "grouped_mm": "transformers grouped_mm"}
    labels = [names.get(name, name) for name in times]
    colours = [OURS if name == "tmoe" else PALE for name in times]
    axes.barh(labels, list(times.values()), color=colours, height=0.7)
    for place, value in enumerate(times.values()):
        axes.text(value + 0.02, place, f"{value:.2f}", va="center", fontsize=9, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 2.3)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.set_title(
        f"time of an expert layer over tmoe's: {picture.device}, bf16, geometric mean of "
        f"{picture.cells} cells ({picture.layers} layers, 1 to 8192 tokens), {picture.date}",
        fontsize=9, loc="left", color=INK,
    )  # fmt: skip


def save(picture: Shown, path: Path) -> None:
    """The same bytes for the same numbers: no date, no random ids."""
    with matplotlib.rc_context({"svg.hashsalt": "tmoe", "font.family": "DejaVu Sans"}):
        numbers = json.dumps(asdict(picture))
        metadata = {"Date": None, "Creator": None, "Title": "tmoe", "Description": numbers}
        draw(picture).savefig(path, metadata=metadata if path.suffix == ".svg" else None)


if __name__ == "__main__":
    suffix = sys.argv[1] if len(sys.argv) > 1 else ".svg"  # .png to look at it
    save(shown(), PATH.with_suffix(suffix))
