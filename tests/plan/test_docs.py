"""docs/planning.md: its tables are current."""

from __future__ import annotations

import json
from typing import Any

from tests.plan.document import PAGE, PARTS, PLACED, written

TEXT = PAGE.read_text(encoding="utf-8")


def test_tables_are_current():
    """python -m tests.plan.document"""
    assert written(TEXT) == TEXT and all(
        f"<!-- {name} -->\n\n**" in TEXT for name in ("gain", "plan")
    )
    assert TEXT.count("<!-- end -->") == len(PARTS)


def test_what_placing_gained_is_what_was_recorded():
    """Beside the table, in words."""
    text = " ".join(TEXT.split())
    rows: dict[tuple[Any, ...], dict[Any, dict[str, Any]]] = {}
    for row in json.loads(PLACED.read_text())["rows"]:
        key = row["exchange"], row["popular"], row["scheme"], row["tokens"]
        rows.setdefault(key, {})[row["redundant"]] = row

    def of(exchange: str, popular: str = "", most: int = 8192) -> list[dict[Any, dict[str, Any]]]:
        return [found for key, found in rows.items()
                if key[0] == exchange and popular in key[1] and key[3] <= most]  # fmt: skip

    def span(numbers: list[float], digits: int = 0) -> str:
        return f"{min(numbers):.{digits}f} to {max(numbers):.{digits}f}"

    for popular, words in (("drawn", "times as fast where popular"), ("together", "times where")):
        gains = [found[None]["us"] / found[0]["us"] for found in of("all_to_all", popular)]
        assert f"{span(gains, 2)} {words}" in text
    best = rows["all_to_all", "together", "fp8_block", 8192]
    gain, predicted = (best[None][k] - best[0][k] for k in ("us", "predicted_experts_us"))
    assert f"takes {gain:.0f} µs less, where the model says {predicted:.0f}" in text
    assert f"up to {max(f[4]['us'] - f[0]['us'] for f in of('all_to_all')):.0f} µs" in text
    lost = [found[0]["us"] - found[None]["us"] for found in of("all_gather", "drawn", 128)]
    copies = [found[4]["us"] - found[0]["us"] for found in of("all_gather")]
    assert f"lost: {span(lost)} µs where they were drawn, and copies {span(copies)} µs" in text
    moved = [found[0] for found in rows.values()]
    megabytes = [row["received_bytes"] / 1e6 for row in moved]
    times = sorted(row["rebalance_ms"] for row in moved)
    assert f"{span(megabytes)} MB into each rank in {span(times[:-1])} ms" in text
    assert times[-1] == moved[0]["rebalance_ms"] > 100
