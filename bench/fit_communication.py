"""Fit `tmoe/parallel/communication.json` to recorded exchanges:

    python -m bench.fit_communication [RECORD of bench.communication]

time = start + bytes / bandwidth, by least squares of log(predicted / recorded): for each operation
of the record over NVLink, and for the network over the times that DeepEP published. Bandwidth is
written as the part of what data sheet and line rate say. Without a record only the network is
fitted again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tmoe.parallel.communication_model import CONSTANTS, OPERATIONS, gpu_named

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "bench" / "results" / "deepep_published.json"
RECORD = ROOT / "bench" / "results" / "h200x2_communication.json"

Point = tuple[float, float]  # bytes over the link, µs


def fit(points: Sequence[Point]) -> tuple[float, float]:
    """start in µs and bandwidth in GB/s, by Gauss and Newton's method in their logarithms."""
    sizes, times = np.array(points, dtype=float).T
    logs = np.log([times.min(), (sizes / times).max()])
    for _ in range(100):
        start, rate = np.exp(logs)
        found = start + sizes / rate
        errors = np.log(found / times)
        slopes = np.stack([start / found, -(sizes / rate) / found], axis=1)
        step = np.linalg.lstsq(slopes, -errors, rcond=None)[0]
        logs = logs + np.clip(step, -0.5, 0.5)
        if np.abs(step).max() < 1e-9:
            break
    start, rate = np.exp(logs)
    return float(start), float(rate) / 1e3


def largest_error(points: Sequence[Point], start: float, gbs: float) -> float:
    """|predicted / recorded - 1|, of the worst point."""
    return max(abs((start + size / gbs / 1e3) / us - 1) for size, us in points)


def recorded_points(record: dict[str, Any]) -> dict[str, list[Point]]:
    """What each rank sends over its links, and how long that took, for each operation."""
    n = record["ranks"]
    found: dict[str, list[Point]] = {name: [] for name in OPERATIONS}
    for row in record["rows"]:
        if row["operation"] in found:
            passes = 2 if row["operation"] == "all_reduce" else 1
            found[row["operation"]].append((passes * row["bytes"] * (n - 1) / n, row["us"]))
    return found


def published_points(published: dict[str, Any]) -> list[Point]:
    """A token goes to K experts, of which those on other nodes are reached over the network."""
    rows = published["tokens"] * published["top_k"] * published["hidden"]
    return [
        (
            rows * row["bytes_per_value"] * (1 - published["ranks_per_host"] / row["ranks"]),
            row["us"],
        )
        for row in published["rows"]
    ]


def fit_nvlink(record: dict[str, Any], name: str) -> dict[str, Any]:
    """The part of the constants that a record of GPUs of one host tells."""
    device = record["machine_info"]["device"]
    sheet = gpu_named(device).nvlink_gbs
    found: dict[str, Any] = {}
    for operation, points in recorded_points(record).items():
        start, gbs = fit(points)
        found[operation] = {
            "start_us": round(start, 2), "reach": round(gbs / sheet, 4),
            "largest_error": round(largest_error(points, start, gbs), 3),
        }  # fmt: skip
    found["source"] = {
        "kind": "measured",
        "what": f"{record['ranks']} × {device}, NCCL {record['nccl']}, CUDA graphs, {name}",
    }
    return found


def fit_network(published: dict[str, Any]) -> dict[str, Any]:
    points = published_points(published)
    start, gbs = fit(points)
    return {
        "start_us": round(start, 1), "reach": round(gbs / (published["net_gbit"] / 8), 3),
        "largest_error": round(largest_error(points, start, gbs), 3),
        "source": {
            "kind": "published",
            "what": f"fitted to DeepEP's low-latency kernels on {published['hardware']}: "
            f"{published['source']}",
        },
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fit_communication", description=__doc__)
    parser.add_argument("record", nargs="?", type=Path, default=RECORD)
    parser.add_argument("--out", type=Path, default=CONSTANTS)
    options = parser.parse_args(arguments)
    found = json.loads(CONSTANTS.read_text(encoding="utf-8"))
    found["network"] = fit_network(json.loads(PUBLISHED.read_text(encoding="utf-8")))
    if options.record.exists():
        record = json.loads(options.record.read_text(encoding="utf-8"))
        found["nvlink"] = fit_nvlink(record, f"bench/results/{options.record.name}")
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for link in ("nvlink", "network"):
        print(link, json.dumps(found[link]))


if __name__ == "__main__":
    main()
