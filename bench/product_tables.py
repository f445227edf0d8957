"""What `bench.training_products` recorded: a table, and what it says of Mixtral's step."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import torch

from tmoe.bench.roofline import ROOFS
from tmoe.bench.shapes import SHAPES
from tmoe.bench.tables import Grid, Row

Json = dict[str, Any]
Times = dict[str, float]  # of a product in µs: torch's first, then the tile in use, then others
DENSE, GROUPED = "torch's dense matmul", "torch's grouped_mm"
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


def where_a_step_goes(training: Json, products: Json, T: int = 16384) -> str:
    """Why Mixtral's step isn't GOAL times as fast as grouped_mm's."""
    steps = {(row["tokens"], row["way"]): row for row in training["rows"] if _is_mixtral(row)}
    speedups = [
        row["us"] / steps[tokens, "tmoe"]["us"]
        for (tokens, way), row in steps.items()
        if way == "grouped_mm"
    ]
    assert max(speedups) < GOAL, "the goal is reached: write so"
    named = products_of(products)
    parts = [named["mixtral-8x7b", T, product] for product in OF_A_STEP]
    shape = SHAPES["mixtral-8x7b"]
    flops = 18 * T * shape.top_k * shape.hidden * shape.intermediate
    peak = ROOFS[training["machine_info"]["device"], torch.bfloat16].tflops

    used = sum(next(iter(_tiles(times).values())) for times in parts)
    grouped, dense = (sum(times[name] for times in parts) for name in (GROUPED, DENSE))
    ours, theirs = steps[T, "tmoe"]["us"], steps[T, "grouped_mm"]["us"]
    assert theirs / GOAL < dense, "torch's matmul would reach the goal"

    def speed(us: float) -> str:
        return f"{us / 1e3:.1f} ms, {flops / us / 1e6:.0f} TFLOP/s"

    text = f"""On Mixtral a step is {min(speedups):.2f} to {max(speedups):.2f} × as fast as
`grouped_mm`'s, not the {GOAL} × that was the goal. At T={T} its six products, timed alone, take all
but {(ours - used) / 1e3:.1f} of {ours / 1e3:.1f} ms ({speed(used)}). Those of transformers, by
torch's grouped GEMM, take as long ({speed(grouped)}), and what is between them
{(theirs - grouped) / 1e3:.1f} ms: that is the gain. {GOAL} × would be a step of
{theirs / GOAL / 1e3:.1f} ms. For the products alone torch's dense matmul takes more
({speed(dense)}), and the floor is {flops / peak / 1e9:.1f} ms at {peak:.0f} TFLOP/s."""
    return textwrap.fill(" ".join(text.split()), 100)


def _is_mixtral(row: Json) -> bool:
    return row["shape"] == "mixtral-8x7b"


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
