"""The tables of docs/planning.md: `python -m tests.plan.document` writes them anew."""

from __future__ import annotations

from pathlib import Path

from tmoe.bench.shapes import SHAPES
from tmoe.bench.tables import Grid
from tmoe.parallel.communication_model import Cluster, constants, sources
from tmoe.plan import known_model, placement_gain, plan

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
SHOWN = 8


def gain() -> str:
    """Two models, on as many ranks as they are usually served with."""
    tables = (
        placement_gain(SHAPES["deepseek-v3"], 32, (16, 128, 1024), scheme="fp8_block"),
        placement_gain(SHAPES["qwen3-30b-a3b"], 8, (16, 128, 1024, 8192)),
    )
    return "\n\n".join(table.as_markdown() for table in tables)


def example() -> str:
    found = plan(known_model("deepseek-v3"), 64, Cluster.of("H200"), scheme="fp8_block")
    grid = found.table()
    table = Grid(grid.title, grid.columns, grid.rows[:SHOWN]).as_markdown()
    return f"{table}\n\n> {found.reason}"


def calibration() -> str:
    rows = ["| constants | known | from |", "| --- | --- | --- |"]
    rows += [f"| {name} | {kind} | {what} |" for name, kind, what in sources()]
    found = ["", "| exchange over NVLink | start, µs | of the data sheet | largest error |"]
    found += ["| --- | ---: | ---: | ---: |"]
    for name, numbers in constants()["nvlink"].items():
        if name != "source":
            error = numbers.get("largest_error")
            text = "–" if error is None else f"{100 * error:.0f} %"
            reach = f"{100 * numbers['reach']:.0f} %"
            found.append(f"| {name} | {numbers['start_us']:.1f} | {reach} | {text} |")
    return "\n".join(rows + found)


PARTS = {"gain": gain, "plan": example, "calibration": calibration}


def written(page: str) -> str:
    """The page with each part's table between its marker and the next `end`."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{part()}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
