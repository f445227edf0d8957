"""The tables of docs/planning.md: `python -m tests.plan.document` writes them anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tmoe.bench.shapes import SHAPES
from tmoe.bench.tables import Grid
from tmoe.parallel.communication_model import Cluster, constants, sources
from tmoe.plan import known_model, placement_gain, plan

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planning.md"
PLACED = ROOT / "bench" / "results" / "h200x2_placement.json"
SHOWN = 8


def gain() -> str:
    """Two models, on as many ranks as they are usually served with."""
    tables = (
        placement_gain(SHAPES["deepseek-v3"], 32, (16, 128, 1024), scheme="fp8_block"),
        placement_gain(SHAPES["qwen3-30b-a3b"], 8, (16, 128, 1024, 8192)),
    )
    return "\n\n".join(table.as_markdown() for table in tables)


def placed() -> str:
    """What `bench.placement` recorded: layers in order and as placed, with each exchange."""
    record = json.loads(PLACED.read_text(encoding="utf-8"))
    machine, rows = record["machine_info"], record["rows"]
    exchanges = list(dict.fromkeys(row["exchange"] for row in rows))
    most = max(row["redundant"] or 0 for row in rows)
    columns = ["model", "scheme", "popular", "T", "busiest rank over the mean", *exchanges]
    columns += ["moved in"]
    lines = [
        f"{rows[0]['ranks']} {machine['device']}, T tokens on each, popularity r^-1.2, CUDA "
        f"graphs, in µs: in order → by load → by load with {most} more slots on each; *moved in*: "
        "what `rebalance` took.", "",
        f"| {' | '.join(columns)} |", "| --- | --- | --- |" + " ---: |" * (len(columns) - 3),
    ]  # fmt: skip
    kinds: dict[tuple[Any, ...], dict[tuple[str, Any], dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row[k] for k in ("model", "scheme", "popular", "tokens"))
        kinds.setdefault(key, {})[row["exchange"], row["redundant"]] = row
    for key, found in kinds.items():
        by_exchange = [
            [found[name, n] for n in (None, 0, most) if (name, n) in found] for name in exchanges
        ]
        cells = [*map(str, key), _steps(by_exchange[0], "load_over_mean", 2)]
        cells += [_steps(one, "us", 0) for one in by_exchange]
        moved = [f"{found[name, 0]['rebalance_ms']:.0f}" for name, n in found if n == 0]
        cells += [f"{', '.join(moved)} ms"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _steps(rows: list[dict[str, Any]], name: str, digits: int) -> str:
    return " → ".join(f"{row[name]:.{digits}f}" for row in rows)


def example() -> str:
    found = plan(known_model("deepseek-v3"), 64, Cluster.of("H200"), scheme="fp8_block")
    grid = found.table()
    table = Grid(grid.title, grid.columns, grid.rows[:SHOWN]).as_markdown()
    return f"{table}\n\n> {found.reason}"


def calibration() -> str:
    rows = ["| constants | known | from |", "| --- | --- | --- |"]
    rows += [f"| {name} | {kind} | {what} |" for name, kind, what in sources()]
    found = ["", "| over NVLink | start, µs | of the data sheet | start of many bytes, µs |"]
    found[-1] += " of the data sheet | largest error |"
    found += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, numbers in constants()["nvlink"].items():
        if name != "source":
            texts = [f"{numbers[few]['start_us']:.1f} | {100 * numbers[few]['reach']:.0f} %"
                     for few in ("few", "many")]  # fmt: skip
            found.append(f"| {name} | {' | '.join(texts)} | {_percent(numbers)} |")
    found += ["", "| tmoe's own part | start, µs | per 1000 rows, µs | per 10^6 values, µs |"]
    found[-1] += " largest error of an exchange alone |"
    found += ["| --- | ---: | ---: | ---: | ---: |"]
    for name, numbers in constants()["tmoe"].items():
        if name != "source":
            texts = [f"{numbers['start_us']:.0f}", f"{1e3 * numbers['us_per_row']:.1f}",
                     f"{1e6 * numbers['us_per_value']:.1f}", _percent(numbers)]  # fmt: skip
            found.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(rows + found)


def _percent(numbers: dict[str, float]) -> str:
    return f"{100 * numbers['largest_error']:.0f} %"


PARTS = {"gain": gain, "placed": placed, "plan": example, "calibration": calibration}


def written(page: str) -> str:
    """The page with each part's table between its marker and the next `end`."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{part()}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
