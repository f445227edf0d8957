"""Fit `tmoe/parallel/communication.json` to recorded exchanges:

    python -m bench.fit_communication [--links RECORD] [--exchanges RECORD]

time = start + bytes / bandwidth, by least squares of log(predicted / recorded): for the network
over the times that DeepEP published; for each operation of the record over NVLink twice, for few
bytes and for many, since NCCL has protocols that start early and others that reach the bandwidth.
What takes less counts. Bandwidth is written as the part of what data sheet and line rate say.

What an exchange of tmoe takes beside that, for its own small kernels and copies, is fitted to the
exchanges alone in a record of bench.parallel: start + rows · (a + hidden size · b), for the rows
that come to a rank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tmoe.bench.shapes import SHAPES
from tmoe.parallel.communication_model import CONSTANTS, OPERATIONS, Cluster, gpu_named
from tmoe.plan.layouts import BACK
from tmoe.shapes import MoEShape

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "bench" / "results" / "deepep_published.json"
LINKS = ROOT / "bench" / "results" / "h200x2_communication.json"
EXCHANGES = ROOT / "bench" / "results" / "h200x2_parallel.json"

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


def fit_two(points: Sequence[Point]) -> list[tuple[float, float]]:
    """For few bytes and for many: the two lines, below both of which the points lie best."""
    ordered, best, found = sorted(points), np.inf, []
    for cut in range(3, len(ordered) - 2):
        lines = [fit(ordered[:cut]), fit(ordered[cut:])]
        error = sum(np.log(predicted(size, lines) / us) ** 2 for size, us in points)
        if error < best:
            best, found = error, lines
    return found


def predicted(size: float, lines: Sequence[tuple[float, float]]) -> float:
    return min(start + size / gbs / 1e3 for start, gbs in lines)


def largest_error(points: Sequence[Point], lines: Sequence[tuple[float, float]]) -> float:
    """|predicted / recorded - 1|, of the worst point."""
    return max(abs(predicted(size, lines) / us - 1) for size, us in points)


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
        lines = fit_two(points)
        found[operation] = {
            name: {"start_us": round(start, 2), "reach": round(gbs / sheet, 4)}
            for name, (start, gbs) in zip(("few", "many"), lines, strict=True)
        }
        found[operation]["largest_error"] = round(largest_error(points, lines), 3)
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
        "largest_error": round(largest_error(points, [(start, gbs)]), 3),
        "source": {
            "kind": "published",
            "what": f"fitted to DeepEP's low-latency kernels on {published['hardware']}: "
            f"{published['source']}",
        },
    }  # fmt: skip


def fit_copies(record: dict[str, Any], cluster: Cluster, name: str) -> dict[str, Any]:
    """What exchanges take beside what is sent, from calls in which no expert computes anything."""
    found: dict[str, Any] = {}
    ways = {
        "all_gather": gathered, "all_to_all": sent_to_all, "symmetric_memory": written_there
    }  # fmt: skip
    for exchange, transfer in ways.items():
        matrix, rest, recorded = [], [], []
        for row in record["rows"]:
            if f"{exchange}_exchange_us" not in row:  # too many tokens for it
                continue
            shape, n = SHAPES[row["model"]], row["ranks"]
            sent = transfer(cluster, row["tokens"], shape, n, row["row_bytes"])
            matrix.append([1.0, row["tokens"] * n, row["tokens"] * n * shape.hidden])
            recorded.append(row[f"{exchange}_exchange_us"])
            rest.append(recorded[-1] - sent)
        if not matrix:  # without its numbers nothing could be chosen
            raise ValueError(f"{name} has no row of {exchange}: record all exchanges")
        numbers = least_squares(np.array(matrix), np.array(rest), 1 / np.array(recorded))
        errors = np.array(matrix) @ numbers - np.array(rest)
        found[exchange] = {
            "start_us": float(f"{numbers[0]:.3g}"), "us_per_row": float(f"{numbers[1]:.3g}"),
            "us_per_value": float(f"{numbers[2]:.3g}"),
            "largest_error": round(float(np.abs(errors / recorded).max()), 3),
        }  # fmt: skip
    device, ranks = record["machine_info"]["device"], record["rows"][0]["ranks"]
    found["source"] = {
        "kind": "measured",
        "what": f"tmoe's own kernels and copies, {ranks} × {device}, CUDA graphs, {name}",
    }
    return found


def least_squares(matrix: np.ndarray, wanted: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """None of the numbers below 0: columns that would be are left out."""
    kept = [*range(matrix.shape[1])]
    while True:
        scaled = matrix[:, kept] * weights[:, None]
        numbers = np.linalg.lstsq(scaled, wanted * weights, rcond=None)[0]
        if len(kept) == 0 or numbers.min() >= 0:
            break
        del kept[int(numbers.argmin())]
    found = np.zeros(matrix.shape[1])
    found[kept] = numbers
    return found


def gathered(cluster: Cluster, tokens: int, shape: MoEShape, ranks: int, size: int) -> float:
    """What is sent with tokens of each rank, in µs, as the planner has it."""
    sent, back, span = tokens * size, tokens * BACK * shape.hidden, cluster.span(ranks)
    return (
        cluster.gather("all_gather", sent, span).us
        + cluster.gather("reduce_scatter", back, span).us
    )


def sent_to_all(cluster: Cluster, tokens: int, shape: MoEShape, ranks: int, size: int) -> float:
    """With a fixed number of rows: those of all tokens to every rank."""
    rows, span = tokens * (ranks - 1), cluster.span(ranks)
    return (
        cluster.all_to_all(rows * size, 0, span).us
        + cluster.all_to_all(rows * BACK * shape.hidden, 0, span).us
    )


def written_there(cluster: Cluster, tokens: int, shape: MoEShape, ranks: int, size: int) -> float:
    """Into others' memory: the rows in use, at what NCCL reaches."""
    rows = tokens * (1 - (1 - 1 / ranks) ** shape.top_k) * (ranks - 1)
    return cluster.written_us(rows * (size + BACK * shape.hidden))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fit_communication", description=__doc__)
    parser.add_argument("--links", type=Path, default=LINKS, help="of bench.communication")
    parser.add_argument("--exchanges", type=Path, default=EXCHANGES, help="of bench.parallel")
    parser.add_argument("--out", type=Path, default=CONSTANTS)
    options = parser.parse_args(arguments)
    found = json.loads(CONSTANTS.read_text(encoding="utf-8"))
    found["network"] = fit_network(json.loads(PUBLISHED.read_text(encoding="utf-8")))
    links, exchanges = (
        json.loads(path.read_text(encoding="utf-8")) for path in (options.links, options.exchanges)
    )
    found["nvlink"] = fit_nvlink(links, f"bench/results/{options.links.name}")
    gpu = gpu_named(exchanges["machine_info"]["device"])
    cluster = Cluster(gpu, 8, 400.0, found)  # none of these leaves a node
    found["tmoe"] = fit_copies(exchanges, cluster, f"bench/results/{options.exchanges.name}")
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for part in ("nvlink", "network", "tmoe"):
        print(part, json.dumps(found[part]))


if __name__ == "__main__":
    main()
