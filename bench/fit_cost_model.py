"""Fit `tmoe/bench/cost_model.py` to recorded times: `python -m bench.fit_cost_model`.

Least squares of log(predicted / recorded) over the Triton backend's layers of a scheme, by Gauss
and Newton's method with Levenberg's damping, in the logarithms of the five numbers. The FP4 schemes
were recorded on one layer only, which can't tell all five apart: two are taken from bf16, whose
kernel they share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tmoe.bench.cases import multiplies_fp8
from tmoe.bench.cost_model import FITTED, Fit, RankLayer, as_json, predict_with
from tmoe.bench.roofline import ROOFS, Roof
from tmoe.bench.shapes import SHAPES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
# As `bench.record` calls them; of a cell that was recorded twice the last one here counts.
NAMES = ("shapes", "routings", "tokens", "beside", "beside_fp8", "quantized")
RECORDS = [
    str(path.relative_to(ROOT))
    for path in (RESULTS / f"h200_{name}.json" for name in NAMES)
    if path.exists()
]
START = Fit(start_us=12, reach_memory=0.95, reach_arithmetic=0.85, overlap=2.2, ramp=100)
PULL = 0.02  # towards START, so that what some cells don't tell stays finite
LEAST = 20  # cells, for all five numbers to be fitted
FIELDS = ("start_us", "reach_memory", "reach_arithmetic", "overlap", "ramp")
FIELDS_OF_FEW = ("start_us", "reach_arithmetic", "overlap")

Cell = tuple[RankLayer, float]  # and its microseconds


def read_cells(paths: Sequence[Path]) -> dict[str, list[Cell]]:
    """The layers that the Triton backend ran on an H200, by scheme."""
    found: dict[str, dict[RankLayer, float]] = {}
    for path in paths:
        for bench in json.loads(path.read_text())["benchmarks"]:
            info = bench["extra_info"]
            ours = info["operation"] in ("layer", "quantized_layer") and info["backend"] == "triton"
            if ours and info["device"] == "NVIDIA H200":
                scheme, routing = info.get("scheme", "bf16"), info.get("routing", "random")
                layer = RankLayer(SHAPES[info["shape"]], info["tokens"], scheme, routing)
                found.setdefault(scheme, {})[layer] = info["us"]
    return {scheme: list(cells.items()) for scheme, cells in found.items()}


def roof_of_scheme(scheme: str) -> Roof:
    return ROOFS["NVIDIA H200", torch.float8_e4m3fn if multiplies_fp8(scheme) else torch.bfloat16]


def fit(cells: Sequence[Cell], start: Fit = START, fields: Sequence[str] = FIELDS) -> Fit:
    """The numbers of `fields` that fit `cells` best; others stay as in `start`."""
    roof = roof_of_scheme(cells[0][0].scheme)

    def with_(logs: np.ndarray) -> Fit:
        values = {name: getattr(start, name) for name in FIELDS}
        return Fit(**values | dict(zip(fields, np.exp(logs).tolist(), strict=True)))

    def errors(logs: np.ndarray) -> np.ndarray:
        found = with_(logs)
        log_ratios = [np.log(predict_with(found, layer, roof).us / us) for layer, us in cells]
        return np.concatenate([log_ratios, PULL * (logs - first)])

    logs = first = np.log([getattr(start, name) for name in fields])
    damping, now = 1e-2, errors(logs)
    for _ in range(60):
        step = 1e-4
        slopes = [(errors(logs + step * axis) - now) / step for axis in np.eye(len(fields))]
        jacobian = np.stack(slopes, axis=1)
        normal = jacobian.T @ jacobian
        move = np.linalg.solve(normal + damping * np.diag(normal.diagonal()), -jacobian.T @ now)
        then = errors(logs + move)
        if then @ then < now @ now:
            done = now @ now - then @ then < 1e-9
            logs, now, damping = logs + move, then, damping / 3
            if done:
                break
        else:
            damping *= 4
    return with_(logs)


def fit_all(cells: dict[str, list[Cell]]) -> dict[str, Fit]:
    """Every scheme that was recorded; bf16 first."""
    fits = {"bf16": fit(cells["bf16"])}
    for scheme, own in cells.items():
        if scheme != "bf16":
            few = len(own) < LEAST
            fits[scheme] = fit(own, fits["bf16"], FIELDS_OF_FEW) if few else fit(own)
    return fits


def largest_error(cells: Sequence[Cell], found: Fit) -> float:
    """|predicted / recorded - 1|, of the worst cell."""
    roof = roof_of_scheme(cells[0][0].scheme)
    return max(abs(predict_with(found, layer, roof).us / us - 1) for layer, us in cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fit_cost_model", description=__doc__)
    parser.add_argument("records", nargs="*", default=RECORDS)
    records = [*parser.parse_args().records]
    cells = read_cells([ROOT / record for record in records])
    fits = fit_all(cells)
    worst = {scheme: largest_error(own, fits[scheme]) for scheme, own in cells.items()}
    FITTED.write_text(as_json(records, fits, worst), encoding="utf-8")
    for scheme, found in fits.items():
        print(f"{scheme:12} {100 * worst[scheme]:4.1f} %  {found}")


if __name__ == "__main__":
    main()
