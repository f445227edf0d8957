"""Where things lie: slots, rows, tiles, bytes. Each function draws one figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from .boxes import arrow, canvas, cell, row
from .paper import colour_of, panels


def blocks_of_places(n: int, block: int) -> Figure:
    """n places under the programs that do a block each; what is behind the end is hatched."""
    figure, axes = panels(7.0, 1.6)
    programs = -(-n // block)
    canvas(axes, -2.2, programs * block + 0.2, -0.3, 2.3)
    colours = [colour_of(place // block) for place in range(programs * block)]
    for pid in range(programs):
        cell(axes, pid * block, 1.1, f"program {pid}", colours[pid * block], width=block)
    row(axes, 0, range(n), colours[:n], "place")
    for place in range(n, programs * block):
        cell(axes, place, 0, hatch="////")
    return figure


def grid_of_blocks(tokens: int, columns: int, block: int) -> Figure:
    """A program for each token and block of columns."""
    figure, axes = panels(8.0, 1.5)
    blocks = -(-columns // block)
    canvas(axes, -6, blocks * block + 0.5, -0.5, 3 * tokens + 0.5)
    for t in range(tokens):
        y = 3 * (tokens - 1 - t)
        for j in range(blocks):
            inside, x = min(block, columns - j * block), j * block
            colour = colour_of(t * blocks + j)
            cell(axes, x, y, f"program ({t}, {j})", colour, width=inside, height=2.6, size=8)
            if inside < block:
                cell(axes, x + inside, y, width=block - inside, height=2.6, hatch="////")
        axes.text(-0.7, y + 1.3, f"token {t}", ha="right", va="center")
    return figure


def sorted_slots(expert_of_slot: Sequence[int], row_to_slot: Sequence[int]) -> Figure:
    """Slots in token order above, and where they go in expert order below."""
    figure, axes = panels(7.4, 2.7)
    S = len(expert_of_slot)
    canvas(axes, -1.6, S + 0.2, -0.9, 4.2)
    colours = [colour_of(e) for e in expert_of_slot]
    row(axes, 3, range(S), colours, "slot")
    row(axes, 0, row_to_slot, [colours[s] for s in row_to_slot], "row")
    for r, s in enumerate(row_to_slot):
        arrow(axes, (s + 0.5, 2.95), (r + 0.5, 1.05), colours[s])
    for e in sorted(set(expert_of_slot)):
        places = [r for r, s in enumerate(row_to_slot) if expert_of_slot[s] == e]
        middle = (places[0] + places[-1] + 1) / 2
        axes.text(middle, -0.25, f"expert {e}", ha="center", va="top")
    return figure


def earlier_slots(yes: Any, rank: Sequence[int], expert_of_slot: Sequence[int]) -> Figure:
    """yes[line][other]: slot `other` is earlier than slot `line`, and of the same expert."""
    figure, axes = panels(5.4, 4.2)
    S = len(rank)
    canvas(axes, -1.2, S + 1.6, -0.2, S + 1.4)
    for line in range(S):
        for other in range(S):
            colour = colour_of(expert_of_slot[line]) if yes[line][other] else None
            cell(axes, other, S - 1 - line, "", colour)
        axes.text(-0.3, S - 0.5 - line, line, ha="right", va="center")
        count = {"ha": "center", "va": "center", "weight": "bold"}
        axes.text(S + 0.9, S - 0.5 - line, rank[line], **count)
        axes.text(line + 0.5, S + 0.2, line, ha="center")
    axes.text(S + 0.9, S + 0.2, "rank", ha="center")
    axes.text(-1.0, S / 2, "slot", rotation=90, va="center", ha="center")
    axes.text(S / 2, S + 0.9, "earlier slot", ha="center")
    return figure


def tiles(parts: Sequence[Sequence[int]], block_m: int) -> Figure:
    """Tiles (expert, first row, end row) side by side; what is left of one is hatched."""
    figure, axes = panels(7.4, 1.2)
    canvas(axes, -1.2, len(parts) * (block_m + 0.4), -0.2, 1.8)
    x = 0.0
    for number, (expert, first, end) in enumerate(parts):
        axes.text(x + block_m / 2, 1.2, f"tile {number}", ha="center")
        for r in range(first, first + block_m):
            if r < end:
                cell(axes, x, 0, r, colour_of(expert))
            else:
                cell(axes, x, 0, hatch="////")
            x += 1
        x += 0.4
    axes.text(-0.25, 0.5, "row", ha="right", va="center")
    return figure


def gate_and_up(rows_of_tiles: Sequence[Sequence[int]]) -> Figure:
    """The rows of an expert's weights, and below them those of each tile."""
    figure, axes = panels(8.0, 1.9)
    rows = sorted(r for tile in rows_of_tiles for r in tile)
    half, block = len(rows) // 2, len(rows_of_tiles[0]) // 2
    width = len(rows) + 0.4 * len(rows_of_tiles)
    canvas(axes, -2.8, width, -1.6, 2.7)
    row(axes, 1.2, rows, [colour_of(r // block % (half // block)) for r in rows], "weight row")
    axes.text(half / 2, 2.35, "gate", ha="center")
    axes.text(half + half / 2, 2.35, "up", ha="center")
    for number, texts in enumerate(rows_of_tiles):
        x = number * (2 * block + 0.4)
        row(axes, -0.8, texts, [colour_of(number)] * len(texts), x=x)
        axes.text(x + block, -1.0, f"tile {number}", ha="center", va="top")
    return figure


def rows_to_tokens(slot_to_row: Sequence[Sequence[int]], expert_of_row: Sequence[int]) -> Figure:
    """Rows in expert order above, the tokens that add them up below."""
    figure, axes = panels(6.4, 2.6)
    S, T = len(expert_of_row), len(slot_to_row)
    canvas(axes, -1.3, S + 0.2, -0.3, 4.3)
    row(axes, 3, range(S), [colour_of(e) for e in expert_of_row], "row")
    for t, rows in enumerate(slot_to_row):
        x = (t + 0.5) * S / T - 0.5  # spread over the width of the rows
        cell(axes, x, 0, f"t{t}")
        for k, r in enumerate(rows):
            end = (x + (k + 1) / (len(rows) + 1), 1.05)
            arrow(axes, (r + 0.5, 2.95), end, colour_of(expert_of_row[r]))
    axes.text(-0.25, 0.5, "token", ha="right", va="center")
    return figure


def swizzle(row_of_byte: Sequence[int], lines: int = 8) -> Figure:
    """The first lines of 16 bytes of a swizzled tile: the row and column of each byte's scale."""
    figure, axes = panels(9.0, 2.9)
    canvas(axes, -5.5, 33, -1.2, lines + 1)
    for y in range(lines):
        for p in range(16):
            m = row_of_byte[16 * y + p]
            text = f"{m},{p % 4}"
            cell(axes, 2 * p, lines - 1 - y, text, colour_of(m // 32), width=2, size=7)
        axes.text(-0.4, lines - 0.5 - y, f"byte {16 * y}", ha="right", va="center")
    title = "row, column of the scale in each byte; a colour is a quarter of the rows"
    axes.text(16, lines + 0.3, title, ha="center")
    axes.text(16, -0.8, f"… {32 - lines} more lines", ha="center")
    return figure
