"""The tables of a report, as text: the terminal, Markdown and the HTML page show the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import geometric_mean
from typing import Any

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .records import Cell


@dataclass(frozen=True, slots=True)
class Row:
    """Cells of one line; marked: it tells of something lost; starts: a group of lines."""

    texts: tuple[str, ...]
    marked: bool = False
    starts: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of text whose first column is aligned left, and the others right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def as_rich(self) -> Group:
        """For the terminal."""
        out = Table(box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
        for place, name in enumerate(self.columns):
            out.add_column(name, justify="right" if place else "left", no_wrap=True)
        for place, row in enumerate(self.rows):
            if row.starts and place:
                out.add_section()
            out.add_row(*row.texts, style="bold red" if row.marked else "")
        return Group(Text(self.title, style="bold"), out, "")

    def as_markdown(self) -> str:
        """With the title above it."""
        lines = [f"**{self.title}**", "", _line(self.columns)]
        lines.append(_line(["---", *["---:"] * (len(self.columns) - 1)]))
        return "\n".join([*lines, *(_line(row.texts) for row in self.rows)])


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(text.strip() for text in texts)} |"


def layers_table(cells: Sequence[Cell]) -> Grid:
    """One line per cell of a scheme and routing; a cell that a peer wins is marked."""
    first = cells[0]
    predicted = any(cell.predicted_us is not None for cell in cells)
    compared = any(cell.peers for cell in cells)
    columns: tuple[str, ...] = ("layer", "T", "floor", "tmoe", "% of floor", "TFLOP/s", "GB/s")
    columns += ("predicted",) * predicted + ("best peer", "speedup") * compared
    rows, previous = [], None
    for cell in cells:
        texts = [cell.shape, str(cell.tokens), us_text(cell.floor_us), us_text(cell.us)]
        texts += [f"{100 * cell.floor_us / cell.us:.0f}", f"{cell.tflops:.0f}", f"{cell.gbs:.0f}"]
        if predicted:
            texts.append("–" if cell.predicted_us is None else us_text(cell.predicted_us))
        if compared and cell.best_peer is not None:
            texts.append(f"{cell.best_peer} {us_text(cell.peers[cell.best_peer])}")
            texts.append(f"{cell.speedup:.2f}" + (" ✗" if cell.loses else "  "))
        elif compared:
            texts += ["–", "–  "]
        rows.append(Row(tuple(texts), cell.loses, cell.shape != previous))
        previous = cell.shape
    mark = " (✗ a peer is faster)" if compared else ""
    title = f"routed experts, {first.scheme}, {first.routing} routing, µs per call{mark}"
    return Grid(title, columns, tuple(rows))


def backends_table(cells: Sequence[Cell]) -> Grid | None:
    """Everybody's times, the fastest with a star; None if there is at most one peer."""
    peers = sorted({peer for cell in cells for peer in cell.peers})
    if len(peers) < 2:
        return None
    rows, previous = [], None
    for cell in cells:
        if not cell.peers:
            continue
        times = {"tmoe": cell.us, **cell.peers}
        fastest = min(times, key=times.__getitem__)
        texts = [
            "–" if name not in times else us_text(times[name]) + (" *" if name == fastest else "  ")
            for name in ("tmoe", *peers)
        ]
        rows.append(Row((cell.shape, str(cell.tokens), *texts), starts=cell.shape != previous))
        previous = cell.shape
    title = f"{cells[0].scheme}, {cells[0].routing} routing, µs per call (* the fastest)"
    return Grid(title, ("layer", "T", "tmoe", *peers), tuple(rows))


def summary_table(cells: Sequence[Cell]) -> Grid:
    """Geometric means over the shapes: % of the floor, and how many times faster than each peer."""
    tokens = sorted({cell.tokens for cell in cells})
    rows = []

    def add(name: str, value: Callable[[Cell], float | None], form: str) -> None:
        groups = [[cell for cell in cells if cell.tokens == T] for T in tokens] + [[*cells]]
        values = [[v for cell in group if (v := value(cell)) is not None] for group in groups]
        means = (format(geometric_mean(v), form) if v else "–" for v in values)
        rows.append(Row((name, *means)))

    add("% of floor", lambda cell: 100 * cell.floor_us / cell.us, ".0f")
    for peer in sorted({peer for cell in cells for peer in cell.peers}):
        add(
            f"over {peer}",
            lambda cell, peer=peer: cell.peers[peer] / cell.us if peer in cell.peers else None,  # type: ignore[misc]
            ".2f",
        )
    if any(cell.peers for cell in cells):
        add("over the best", lambda cell: cell.speedup, ".2f")
    title = f"{cells[0].scheme}, geometric means: % of floor, speedup over each peer"
    return Grid(title, ("", *(f"T = {T}" for T in tokens), "all"), tuple(rows))


def standing_table(cells: Sequence[Cell], together: Sequence[str]) -> Grid:
    """Of cells that have peers, scheme by scheme: how many a peer wins, and geometric means; in the
    last line those of the schemes `together`."""
    schemes = [(scheme,) for scheme in dict.fromkeys(cell.scheme for cell in cells)]
    rows = []
    for group in (*schemes, tuple(together)):
        own = [cell for cell in cells if cell.scheme in group]
        lost = sum(cell.loses for cell in own)
        over_vllm = [cell.peers["vllm"] / cell.us for cell in own if "vllm" in cell.peers]
        over_best = [cell.speedup for cell in own if cell.speedup is not None]
        texts = [" + ".join(group), str(len(own)), str(lost)]
        texts += [f"{geometric_mean(v):.2f}" if v else "–" for v in (over_vllm, over_best)]
        rows.append(Row(tuple(texts), starts=len(group) > 1))
    columns = ("weights", "cells", "a peer is faster", "over vllm", "over the best peer")
    return Grid("all cells of random routing, geometric means of speedups", columns, tuple(rows))


def skew_table(cells: Sequence[Cell]) -> Grid | None:
    """Time per flop over that of balanced routing, whose flops are the same; None without both."""
    balanced = {
        (cell.scheme, cell.shape, cell.tokens): cell.us
        for cell in cells
        if cell.routing == "balanced"
    }
    routings = [r for r in dict.fromkeys(cell.routing for cell in cells) if r != "balanced"]
    if not balanced or not routings:
        return None
    found = {(cell.scheme, cell.shape, cell.tokens, cell.routing): cell.us for cell in cells}
    rows, previous = [], None
    for (scheme, shape, tokens), us in balanced.items():
        others = [found.get((scheme, shape, tokens, routing)) for routing in routings]
        ratios = ["–" if other is None else f"{other / us:.2f}" for other in others]
        starts = previous != (scheme, shape)
        rows.append(Row((shape, scheme, str(tokens), us_text(us), *ratios), starts=starts))
        previous = (scheme, shape)
    columns = ("layer", "scheme", "T", "balanced, µs", *routings)
    return Grid("time per flop over that of balanced routing", columns, tuple(rows))


def operations_table(
    results: dict[str, Any], recorded: dict[str, Any], backend: str
) -> Grid | None:
    """The single operations that `backend` ran and a peer was measured on; None if there are none.

    A benchmark's group says what was timed, and with which sizes.
    """
    peer = recorded["peer"]
    times = {row["group"]: row["us"] for row in recorded["rows"]}
    rows = []
    for bench in results["benchmarks"]:
        info, us = bench["extra_info"], times.get(bench.get("group"))
        if us is None or info["backend"] != backend or info["device"] != recorded["device"]:
            continue
        speedup, floor = us / info["us"], info["floor_us"]
        texts = [bench["group"], us_text(floor), f"{info['us']:.2f}"]
        texts += [f"{100 * floor / info['us']:.0f}", f"{us:.2f}"]
        texts.append(f"{speedup:.2f}" + (" ✗" if speedup < 1 else "  "))
        rows.append(Row(tuple(texts), speedup < 1))
    columns = ("operation", "floor", "tmoe", "% of floor", peer, "speedup")
    title = f"operations, µs per call (✗ {peer} is faster)"
    return Grid(title, columns, tuple(rows)) if rows else None


def all_tables(
    results: dict[str, Any], cells: Sequence[Cell], peer_operations: dict[str, Any], backend: str
) -> list[Grid]:
    """Operations, then layers by scheme and routing with a summary of each, then the skew."""
    tables: list[Grid | None] = [operations_table(results, peer_operations, backend)]
    for _, group in groupby(sorted(cells, key=_kind), key=_kind):
        own = [*group]
        tables += [layers_table(own), backends_table(own)]
        if len({cell.shape for cell in own}) > 1:
            tables.append(summary_table(own))
    tables.append(skew_table(cells))
    return [table for table in tables if table is not None]


def _kind(cell: Cell) -> tuple[bool, str, bool, str]:
    """Unquantised layers first, then random routing."""
    unquantised = cell.scheme in ("bfloat16", "float16", "float32")
    return not unquantised, cell.scheme, cell.routing != "random", cell.routing


def us_text(us: float) -> str:
    """Microseconds with three digits or more."""
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"
