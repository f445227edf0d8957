"""The tables of docs/parallel.md: `python -m tests.parallel.document` writes them anew."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parallel.md"
RECORD = ROOT / "bench" / "results" / "h200x2_parallel.json"
BEGIN, END = "<!-- times -->\n", "<!-- end -->"
# Of each exchange: what NCCL takes for the same bytes, for the rows that leave a rank.
NCCL = {
    "all_gather": "nccl_us",
    "all_to_all": "nccl_to_others_us",
    "symmetric_memory": "nccl_to_others_us",
}
FEW = 128  # tokens: of a decoder
GOAL_US = 60  # beside its experts, for few tokens
NEAR = 1.15  # times NCCL's own time

Row = dict[str, Any]


def times(record: dict[str, Any]) -> str:
    """All tables, and what they come to."""
    machine, rows = record["machine_info"], record["rows"]
    versions = machine["versions"]
    about = (
        f"Two {machine['device']}, torch {versions['torch']}, Triton {versions['triton']}, CUDA "
        "graphs, T tokens on each, `dp + ep`, in µs; *one*: a GPU with the tokens of both; *+*: a "
        "call less its experts, of each call the slower rank's, and which part of the call that is."
    )
    parts = [[about], whole(rows), found(rows), alone(rows), overlap(rows)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def whole(rows: list[Row]) -> list[str]:
    """What one GPU takes, what two take, and what they take beside their experts."""
    lines = []
    for row in rows:
        cells = [f"{row['one_us']:.0f}"]
        for name in NCCL:
            if f"{name}_us" not in row:
                cells += ["", "", ""]
                continue
            us, over = row[f"{name}_us"], beside_experts(row, name)
            cells += [f"{us:.0f}", f"{row['one_us'] / us:.2f}"]
            cells += [f"{over:.0f}, {100 * over / us:.0f} %"]
        lines.append(line(row, cells))
    columns = ["one"]
    for name in NCCL:
        columns += [name, "times as fast", "+"]
    return header(columns) + lines


def found(rows: list[Row]) -> list[str]:
    """In words."""
    few = [row for row in rows if row["tokens"] <= FEW]
    lines = []
    for name in NCCL:
        have = [row for row in few if f"{name}_us" in row]
        if not have:
            continue
        texts = []
        for model in dict.fromkeys(row["model"] for row in have):
            over = [beside_experts(row, name) for row in have if row["model"] == model]
            texts.append(f"{min(over):.0f} to {max(over):.0f} µs ({model})")
        above = [cell(row) for row in have if beside_experts(row, name) > GOAL_US]
        exchange = [row[f"{name}_exchange_us"] for row in have]
        lines.append(
            f"* `{name}`, up to {FEW} tokens a rank: {' and '.join(texts)} beside the experts; the "
            f"exchange alone {min(exchange):.0f} to {max(exchange):.0f} µs. "
            f"More than {GOAL_US} µs: {', '.join(above) or 'none'}."
        )
    far = [f"{cell(row)} ({ratio(row, 'all_gather'):.3f})" for row in rows
           if ratio(row, "all_gather") > NEAR]  # fmt: skip
    lines.append(
        f"* Of all-gather's {len(rows)} rows {len(rows) - len(far)} are within 15 % of what NCCL "
        f"alone takes for the same bytes; not so {', '.join(far) or 'none'}."
    )
    return lines


def alone(rows: list[Row]) -> list[str]:
    """The exchange without experts, and how many times NCCL's own time that is."""
    columns: list[str] = []
    for name in NCCL:
        columns += [f"{name} alone", "× NCCL"]
    lines = []
    for row in rows:
        cells = []
        for name in NCCL:
            has = f"{name}_exchange_us" in row
            cells += [f"{row[f'{name}_exchange_us']:.0f}" if has else ""]
            cells += [f"{ratio(row, name):.2f}" if has else ""]
        lines.append(line(row, cells))
    about = (
        "An exchange alone, its experts saying nothing, and how many times that is what NCCL takes "
        "for the same bytes: to gather and to reduce-scatter, or to send rows to the other rank "
        "and sums back."
    )
    return [about, "", *header(columns), *lines]


def overlap(rows: list[Row]) -> list[str]:
    """Of every row with a shared expert: the whole layer with it in turn and on a stream of its
    own, and how much of that expert's time is hidden so."""
    lines, columns = [], []
    for name in NCCL:
        columns += [name, "hidden"]
    for row in rows:
        cells = []
        for name in NCCL:
            if f"{name}_beside_us" not in row:
                cells += ["", ""]
                continue
            routed, in_turn, beside = (
                row[f"{name}_{w}_us"] for w in ("routed", "in_turn", "beside")
            )
            cells += [f"{in_turn:.0f} → {beside:.0f}"]
            cells += [percent(in_turn - beside, in_turn - routed)]
        if any(cells):
            lines.append(line(row, cells))
    if not lines:
        return []
    about = (
        "The whole layer, its shared expert in turn → on a stream of its own; *hidden*: how much "
        "of the time that this expert adds."
    )
    return [about, "", *header(columns), *lines]


def beside_experts(row: Row, name: str) -> float:
    us: float = row[f"{name}_us"] - row[f"{name}_experts_us"]
    return us


def ratio(row: Row, name: str) -> float:
    times_as_long: float = row[f"{name}_exchange_us"] / row[NCCL[name]]
    return times_as_long


def percent(part: float, of: float) -> str:
    return f"{100 * part / of:.0f} %" if of > 0 else "—"


def cell(row: Row) -> str:
    return f"{row['model']} {row['scheme']} T={row['tokens']}"


def line(row: Row, cells: Iterable[str]) -> str:
    return f"| {' | '.join([row['model'], row['scheme'], str(row['tokens']), *cells])} |"


def header(columns: Iterable[str]) -> list[str]:
    names = ["model", "scheme", "T", *columns]
    return [f"| {' | '.join(names)} |", "| --- | --- |" + " ---: |" * (len(names) - 2)]


def written(page: str) -> str:
    """The page with the tables between their marker and the next `end`."""
    before, _, rest = page.partition(BEGIN)
    table = times(json.loads(RECORD.read_text(encoding="utf-8")))
    return f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
