"""The prediction as tables: over tokens, and how it grows with T, E, K and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..shapes import MoEShape
from .cost_model import predict
from .tables import Grid, Row, us_text

RANKS = (2, 4, 8)


def over_tokens(shape: MoEShape, tokens: Sequence[int], **options: Any) -> Grid:
    """A line per number of tokens. options: as those of `predict`."""
    rows = []
    for count in tokens:
        found = predict(shape, count, **options)
        texts = [str(count), us_text(found.floor_us), us_text(found.us)]
        texts += [f"{100 * found.floor_us / found.us:.0f}", found.bound]
        texts += [f"{found.load.touched:.4g}", f"{found.load.padded_rows / found.load.rows:.2f}"]
        parts = (found.start_us, found.gate_up_us, found.down_us, found.combine_us)
        rows.append(Row((*texts, *map(us_text, parts))))
    columns = (
        "T",
        "floor",
        "predicted",
        "% of floor",
        "bound by",
        "experts",
        "rows computed / given",
    )
    title = f"{shape.name}, {_words(options)}, µs per call"
    return Grid(title, (*columns, "start", "gate_up", "down", "combine"), tuple(rows))


def growth(shape: MoEShape, tokens: Sequence[int], **options: Any) -> Grid:
    """Predicted time over that of the layer as it is, where one size is doubled, or the layer is
    spread over ranks that keep all tokens together."""
    E, K = shape.num_experts, shape.top_k
    asked: list[tuple[str, MoEShape, int, dict[str, int]]] = [("2 T", shape, 2, {})]
    asked.append(("2 E", replace(shape, num_experts=2 * E), 1, {}))
    if 2 * K <= E:
        asked.append(("2 K", replace(shape, top_k=2 * K), 1, {}))
    for name, size in (("tp", shape.intermediate), ("ep", E)):
        for count in RANKS:
            if size % count == 0:
                asked.append((f"{name.upper()} {count}", shape, 1, {name: count}))
    asked = [line for line in asked if not line[3].keys() & _asked_ranks(options)]
    usual = {count: predict(shape, count, **options).us for count in tokens}
    rows = []
    for name, changed, times, ranks in asked:
        ratios = [
            predict(changed, times * count, **options | ranks).us / usual[count] for count in tokens
        ]
        rows.append(Row((name, *(f"{ratio:.2f}" for ratio in ratios))))
    title = f"{shape.name}, {_words(options)}: predicted time over that of the layer as it is"
    return Grid(title, ("", *(f"T = {count}" for count in tokens)), tuple(rows))


def _asked_ranks(options: dict[str, Any]) -> set[str]:
    return {name for name in ("tp", "ep") if options.get(name, 1) > 1}


def _words(options: dict[str, Any]) -> str:
    ranks = [f"{name.upper()} {options[name]}" for name in ("tp", "ep") if options.get(name, 1) > 1]
    words = [options.get("scheme", "bf16"), f"{options.get('routing', 'random')} routing", *ranks]
    return ", ".join(words)
