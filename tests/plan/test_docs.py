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

    def span(numbers: list[float], digits: int = 0) -> str:
        return f"{min(numbers):.{digits}f} to {max(numbers):.{digits}f}"

    def gains(exchange: str, popular: str) -> str:
        found = [f[None]["us"] / f[0]["us"] for key, f in rows.items()
                 if key[:2] == (exchange, popular)]  # fmt: skip
        return span(found, 2)

    names = ("symmetric_memory", "all_to_all", "all_gather")
    drawn, together = ([gains(name, kind) for name in names] for kind in ("drawn", "together"))
    assert f"{drawn[0]} times as fast with symmetric memory, {drawn[1]} times with all-to" in text
    assert f"{drawn[2]} times with all-gather; where" in text
    assert f"on one rank, {together[0]}, {together[1]} and {together[2]} times" in text
    lost = {key: found[0]["us"] - found[None]["us"] for key, found in rows.items()}
    assert {name for (name, *_), us in lost.items() if us > 0} == {"all_gather"}
    assert f"lost by it, at most {max(lost.values()):.0f} µs" in text
    said = []
    for tokens in (8192, 128):
        found = rows["symmetric_memory", "together", "fp8_block", tokens]
        said += [found[None][k] - found[0][k] for k in ("us", "predicted_experts_us")]
    assert f"takes {said[0]:.0f} µs less, where the model says {said[1]:.0f}" in text
    assert f"with 128 tokens {said[2]:.0f}, where it says {said[3]:.0f}" in text
    copies = [found[4]["us"] - found[0]["us"] for found in rows.values()]
    assert f"cost up to {max(copies):.0f} µs, and gained {-min(copies):.0f} at most" in text


def test_what_moving_took_is_what_was_recorded():
    text = " ".join(TEXT.split())
    moved = [row for row in json.loads(PLACED.read_text())["rows"] if row["redundant"] == 0]
    megabytes = [row["received_bytes"] / 1e6 for row in moved]
    *usual, second, longest = sorted(row["rebalance_ms"] for row in moved)
    times = f"{min(usual):.0f} to {max(usual):.0f} ms, but for two of {len(moved)} times"
    assert f"{min(megabytes):.0f} to {max(megabytes):.0f} MB into each rank in {times}" in text
    assert second == moved[0]["rebalance_ms"] > 100
    assert f"the very first took {second:.0f} ms, one other {longest:.0f}" in text
