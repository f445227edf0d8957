"""Time over the number of tokens, one picture per layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from tmoe.formats import SCHEMES

if TYPE_CHECKING:
    from bench.compare import Cell


def plot(cells: list[Cell], directory: Path) -> list[Path]:
    """Write `<layer>.png` for each layer of `cells`, `<layer>-<scheme>.png` with quantised weights:
    tmoe, every peer, and the floor."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for shape, scheme in dict.fromkeys((cell.shape, cell.scheme) for cell in cells):
        name = f"{shape}-{scheme}" if scheme in SCHEMES else shape
        path = directory / f"{name}.png"
        own = [cell for cell in cells if (cell.shape, cell.scheme) == (shape, scheme)]
        _figure(name, sorted(own, key=lambda cell: cell.tokens)).savefig(path, dpi=150)
        paths.append(path)
    return paths


def _figure(name: str, cells: list[Cell]) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    tokens = [cell.tokens for cell in cells]
    floor = [cell.floor_us for cell in cells]
    axes.fill_between(tokens, floor, min(floor) / 2, color="0.92", lw=0)
    axes.plot(tokens, floor, color="0.5", ls="--", lw=1, label="floor")
    for peer in sorted({peer for cell in cells for peer in cell.peers}):
        have = [cell for cell in cells if peer in cell.peers]
        times = [cell.peers[peer] for cell in have]
        axes.plot([cell.tokens for cell in have], times, marker=".", lw=1, label=peer)
    axes.plot(tokens, [cell.us for cell in cells], color="black", marker="o", lw=2, label="tmoe")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(bottom=min(floor) / 2)
    axes.set_xticks(tokens, [str(T) for T in tokens])
    axes.set(title=f"{name}, routed experts", xlabel="tokens", ylabel="µs")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure
