"""The table of docs/parallel.md: `python -m tests.parallel.document` writes it anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parallel.md"
RECORD = ROOT / "bench" / "results" / "h200x2_parallel.json"
BEGIN, END = "<!-- times -->\n", "<!-- end -->"
EXCHANGES = ("all_gather", "all_to_all", "symmetric_memory")


def times(record: dict[str, Any]) -> str:
    """Of every row what one GPU takes, what two take, and what they take beside their experts."""
    machine = record["machine_info"]
    versions = machine["versions"]
    lines = [
        f"Two {machine['device']}, torch {versions['torch']}, Triton {versions['triton']}, CUDA "
        "graphs, T tokens on each, `dp + ep`, in µs; *one*: a GPU with the tokens of both; *+*: a "
        "call less its experts; *NCCL*: gathering and reduce-scattering the same bytes.",
        "",
    ]
    if "nccl_to_all_us" not in record["rows"][0]:
        lines[0] += " Recorded before all-to-all had kernels of its own and tokens went as codes."
    columns = ["model", "scheme", "T", "one"]
    shown = [n for n in EXCHANGES if any(f"{n}_us" in row for row in record["rows"])]
    for name in shown:
        columns += [name, "times as fast", "+"]
    columns += ["NCCL"]
    to_all = "nccl_to_all_us" in record["rows"][0]
    columns += ["NCCL, all-to-all"] if to_all else []
    lines += [f"| {' | '.join(columns)} |", "| --- | --- |" + " ---: |" * (len(columns) - 2)]
    for row in record["rows"]:
        cells = [row["model"], row["scheme"], str(row["tokens"]), f"{row['one_us']:.0f}"]
        for name in shown:
            if f"{name}_us" not in row:
                cells += ["", "", ""]
                continue
            us, experts = row[f"{name}_us"], row[f"{name}_experts_us"]
            cells += [f"{us:.0f}", f"{row['one_us'] / us:.2f}", f"{us - experts:.0f}"]
        cells += [f"{row['nccl_us']:.0f}"]
        cells += [f"{row['nccl_to_all_us']:.0f}"] if to_all else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *overlap(record)])


def overlap(record: dict[str, Any]) -> list[str]:
    """Of every row with a shared expert: the layer with it on a stream of its own, and without."""
    lines = []
    for row in record["rows"]:
        for name in EXCHANGES:
            if f"{name}_beside_us" in row:
                cells = [row["model"], row["scheme"], str(row["tokens"]), name]
                cells += [f"{row[f'{name}_{w}_us']:.0f}" for w in ("routed", "in_turn", "beside")]
                lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return []
    return [
        "", "The whole layer: without its shared expert, with it in turn, and with it on a stream "
        "of its own.", "",
        "| model | scheme | T | exchange | without | in turn | beside |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: |", *lines,
    ]  # fmt: skip


def written(page: str) -> str:
    """The page with the table between its marker and the next `end`."""
    before, _, rest = page.partition(BEGIN)
    table = times(json.loads(RECORD.read_text(encoding="utf-8")))
    return f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
