"""What `bench.training_products` recorded: a table, and what it says of Mixtral's step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tmoe.bench.shapes import SHAPES
from tmoe.bench.tables import Grid, Row

Json = dict[str, Any]
Times = dict[str, float]  # of a product in µs: torch's first, then the tile in use, then others
DENSE, GROUPED = "torch's dense matmul", "torch's grouped_mm"
MIXTRAL = "mixtral-8x7b"
GOAL = 1.5  # times as fast as transformers' grouped_mm
OF_A_STEP = (
    "gate_up, gathered", "down", "d_activated, gathered", "d_rows", "d_down", "d_gate_up",
)  # fmt: skip


def product_table(found: Json) -> Grid:
    """A line for each product; which tile is the fastest, field by field."""
    lines = []
    for (shape, tokens, product), times in products_of(found).items():
        tiles = _tiles(times)
        best = min(tiles, key=lambda tile: tiles[tile])
        texts = [shape, str(tokens), product]
        texts += [f"{times[torchs]:.0f}" if torchs in times else "–" for torchs in (DENSE, GROUPED)]
        texts += [f"{next(iter(tiles.values())):.0f}", f"{tiles[best]:.0f}"]
        lines.append(Row((*texts, _short(best))))
    machine = found["machine_info"]
    columns = ("layer", "T", "product", "dense", "grouped_mm", "tmoe", "fastest", "with")
    return Grid(f"µs, {machine['device']}, commit {machine['commit']}", columns, tuple(lines))


def where_a_step_goes(training: Json, products: Json) -> Iterator[str]:
    """Mixtral's step beside grouped_mm's, and how much of each its products are; nothing where they
    weren't recorded together. In Markdown."""
    steps = {
        (row["tokens"], row["way"]): row["us"]
        for row in training["rows"]
        if row["shape"] == MIXTRAL and "us" in row
    }
    speedups = {
        T: us / steps[T, "tmoe"]
        for (T, way), us in steps.items()
        if way == "grouped_mm" and (T, "tmoe") in steps
    }
    named = products_of(products)
    whole = [T for T in speedups if all((MIXTRAL, T, name) in named for name in OF_A_STEP)]
    if not whole:
        return
    T = max(whole)
    parts = [named[MIXTRAL, T, name] for name in OF_A_STEP]
    shape = SHAPES[MIXTRAL]
    flops = 18 * T * shape.top_k * shape.hidden * shape.intermediate
    peak = training["machine_info"]["matmul_tflops_at_start"]
    ours = sum(next(iter(_tiles(times).values())) for times in parts)
    grouped, dense = (sum(times[name] for times in parts) for name in (GROUPED, DENSE))
    goal = steps[T, "grouped_mm"] / GOAL

    def line(name: str, alone: float, step: float | None = None) -> Row:
        texts = [name, f"{alone / 1e3:.1f}", f"{flops / alone / 1e6:.0f}"]
        texts += [f"{us / 1e3:.1f}" for us in (step - alone, step)] if step else ["–", "–"]
        return Row(tuple(texts))

    yield (
        f"On Mixtral a step is {min(speedups.values()):.2f} to {max(speedups.values()):.2f} × as "
        f"fast as `grouped_mm`'s; the goal was {GOAL} ×. Of its time at T={T}:"
    )
    columns = ("products by", f"the {len(parts)} alone", "TFLOP/s", "all else", "step")
    lines = (
        line("tmoe", ours, steps[T, "tmoe"]),
        line(f"{GROUPED}, as in transformers", grouped, steps[T, "grouped_mm"]),
        line(DENSE, dense),
        line("torch's 8192³ matmul's speed", flops / peak / 1e6),
    )
    yield Grid(f"{MIXTRAL}, T={T}, ms", columns, lines).as_markdown()
    less = "less" if goal < dense else "more"
    yield (
        f"{GOAL} × is a step of {goal / 1e3:.1f} ms, {less} than torch's dense matmul takes for "
        "the products alone."
    )


def products_of(found: Json) -> dict[tuple[str, int, str], Times]:
    """By layer, tokens and product."""
    products: dict[tuple[str, int, str], Times] = {}
    for row in found["rows"]:
        times = products.setdefault((row["shape"], row["tokens"], row["product"]), {})
        times[row["tile"]] = row["us"]
    return products


def _tiles(times: Times) -> Times:
    return {tile: us for tile, us in times.items() if "Tile(" in tile}


def _short(tile: str) -> str:
    """Tile(block_m=128, …) as its numbers, and the flags that are set."""
    fields = re.findall(r"(\w+)=(\w+)", tile)
    return ", ".join(
        value if value.isdigit() else name for name, value in fields if value != "False"
    )
