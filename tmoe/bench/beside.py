"""What was measured beside its peers: `python -m bench.compare results.json [--plot DIR]`.

`results.json` is what `pytest bench/bench_layer.py --benchmark-json=results.json` wrote, or another
benchmark. Peers that it timed too count as measured; others come from the recorded files, if those
are of the same GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
RECORDED = (RESULTS / "peers_h200.json", RESULTS / "peers_h200_quantized.json")
RECORDED_OPERATIONS = RESULTS / "peers_h200_operations.json"
LAYERS = ("layer", "quantized_layer")  # operations
OURS = ("triton", "torch")  # backends of tmoe; every other name is a peer


@dataclass(frozen=True, slots=True)
class Cell:
    """One layer at one number of tokens; times in microseconds."""

    scheme: str  # of quantised weights; otherwise the dtype
    shape: str
    tokens: int
    us: float
    floor_us: float
    peers: dict[str, float]  # peer -> time

    @property
    def best_peer(self) -> str | None:
        return min(self.peers, key=self.peers.__getitem__, default=None)

    @property
    def speedup(self) -> float | None:
        """Time of the best peer over ours; above 1 we are faster."""
        best = self.best_peer
        return None if best is None else self.peers[best] / self.us

    @property
    def loses(self) -> bool:
        return self.speedup is not None and self.speedup < 1


def read_recorded(paths: Iterable[Path] = RECORDED) -> dict[str, Any]:
    """The recorded layers of all files as one."""
    files = [json.loads(path.read_text()) for path in paths]
    merged = files[0] | {"rows": []}
    for file in files:
        if file["device"] != merged["device"]:
            wanted, got = merged["device"], file["device"]
            raise ValueError(f"read_recorded: paths must be of one device, {wanted}, got {got}")
        merged["rows"] += [{"scheme": file.get("dtype")} | row for row in file["rows"]]
    return merged


def read_cells(results: dict[str, Any], recorded: dict[str, Any], backend: str) -> list[Cell]:
    """The layers that `backend` ran in pytest-benchmark's `results`, each with its peers."""
    infos = [bench["extra_info"] for bench in results["benchmarks"]]
    layers = [info for info in infos if info.get("operation") in LAYERS]
    times: dict[tuple[str, str, int], dict[str, float]] = {}
    if any(_same_conditions(info, recorded) for info in layers):
        for row in recorded["rows"]:
            times.setdefault(_key(row), {})[row["peer"]] = row["us"]
    for info in layers:
        if info["backend"] not in OURS:  # just measured: takes the place of what is recorded
            times.setdefault(_key(info), {})[info["backend"]] = info["us"]
    return [
        Cell(*_key(info), info["us"], info["floor_us"], times.get(_key(info), {}))
        for info in layers
        if info["backend"] == backend
    ]


def _key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row.get("scheme") or row["dtype"], row["shape"], row["tokens"]


def _same_conditions(info: dict[str, Any], recorded: dict[str, Any]) -> bool:
    return (info["device"], info["dtype"]) == (recorded["device"], recorded["dtype"])


def table(cells: Sequence[Cell]) -> Table:
    """One row per cell of a scheme; a cell that a peer wins is marked."""
    out = _plain_table(f"routed experts, {cells[0].scheme}, µs per call (✗ a peer is faster)")
    out.add_column("layer", no_wrap=True)
    for name in ("T", "floor", "tmoe", "% of floor", "best peer", "speedup"):
        out.add_column(name, justify="right")
    previous = None
    for cell in cells:
        if previous not in (None, cell.shape):
            out.add_section()
        previous = cell.shape
        row = [cell.shape, str(cell.tokens), _us(cell.floor_us), _us(cell.us)]
        row.append(f"{100 * cell.floor_us / cell.us:.0f}")
        if cell.best_peer is not None:
            row.append(f"{cell.best_peer} {_us(cell.peers[cell.best_peer])}")
            row.append(f"{cell.speedup:.2f}" + (" ✗" if cell.loses else "  "))
        out.add_row(*row, style="bold red" if cell.loses else "")
    return out


def operations_table(
    results: dict[str, Any], recorded: dict[str, Any], backend: str
) -> Table | None:
    """The single operations that `backend` ran and a peer was measured on; None if there are none.

    A benchmark's group says what was timed, and with which sizes.
    """
    peer = recorded["peer"]
    times = {row["group"]: row["us"] for row in recorded["rows"]}
    out = _plain_table(f"operations, µs per call (✗ {peer} is faster)")
    out.add_column("operation", no_wrap=True)
    for name in ("floor", "tmoe", "% of floor", peer, "speedup"):
        out.add_column(name, justify="right", no_wrap=True)
    for bench in results["benchmarks"]:
        info, us = bench["extra_info"], times.get(bench.get("group"))
        if us is None or info["backend"] != backend or info["device"] != recorded["device"]:
            continue
        speedup, floor = us / info["us"], info["floor_us"]
        percent = f"{100 * floor / info['us']:.0f}"
        row = [bench["group"], _us(floor), f"{info['us']:.2f}", percent, f"{us:.2f}"]
        out.add_row(
            *row,
            f"{speedup:.2f}" + (" ✗" if speedup < 1 else "  "),
            style="bold red" if speedup < 1 else "",
        )
    return out if out.row_count else None


def _plain_table(title: str) -> Table:
    return Table(title=title, box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0))


def _us(us: float) -> str:
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def summary(cells: Sequence[Cell]) -> Table:
    """Geometric means over the shapes: % of the floor, and how many times faster than each peer."""
    tokens = sorted({cell.tokens for cell in cells})
    out = _plain_table(f"{cells[0].scheme}, geometric means: % of floor, speedup over each peer")
    out.add_column("")
    for column in (*(f"T = {T}" for T in tokens), "all"):
        out.add_column(column, justify="right")

    def add(name: str, value: Callable[[Cell], float | None], form: str) -> None:
        groups = [[cell for cell in cells if cell.tokens == T] for T in tokens] + [cells]
        values = [[v for cell in group if (v := value(cell)) is not None] for group in groups]
        out.add_row(name, *(format(geometric_mean(v), form) if v else "–" for v in values))

    add("% of floor", lambda cell: 100 * cell.floor_us / cell.us, ".0f")
    for peer in sorted({peer for cell in cells for peer in cell.peers}):
        add(
            f"over {peer}",
            lambda cell, peer=peer: cell.peers[peer] / cell.us if peer in cell.peers else None,
            ".2f",
        )
    add("over the best", lambda cell: cell.speedup, ".2f")
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--recorded", type=Path, nargs="+", default=RECORDED, help="peers measured before"
    )
    parser.add_argument("--backend", choices=OURS, default="triton", help="whose times are ours")
    parser.add_argument(
        "--plot", type=Path, metavar="DIR", help="draw time over T, a PNG per layer"
    )
    options = parser.parse_args(arguments)

    results = json.loads(options.results.read_text())
    recorded = read_recorded(options.recorded)
    cells = read_cells(results, recorded, options.backend)
    operations = operations_table(
        results, json.loads(RECORDED_OPERATIONS.read_text()), options.backend
    )
    if not cells and operations is None:
        wanted = f"no layer that the {options.backend} backend ran, and no operation with a peer"
        parser.error(f"{options.results} has {wanted}")

    console = Console()
    if not console.is_terminal:  # a pipe or a file has room for the longest names
        console = Console(width=110)
    if operations is not None:
        console.print(operations)
        console.print()
    for scheme in dict.fromkeys(cell.scheme for cell in cells):
        of_scheme = [cell for cell in cells if cell.scheme == scheme]
        console.print(table(of_scheme))
        console.print()
        console.print(summary(of_scheme))
        console.print()
    machine = results["machine_info"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    console.print(f"{machine['device']}; {versions}", highlight=False)
    start, end = machine["matmul_tflops_at_start"], machine["matmul_tflops_at_end"]
    console.print(f"torch's matmul: {start:.3g} TFLOP/s before, {end:.3g} after", highlight=False)
    provenance = f"recorded peers: {recorded['provenance']}"
    if machine["device"] != recorded["device"]:
        provenance += "; left out, since this is another device"
    console.print(provenance, highlight=False)
    compared = [cell for cell in cells if cell.peers]
    if compared:
        lost = sum(cell.loses for cell in compared)
        console.print(f"a peer is faster in {lost} of {len(compared)} cells", highlight=False)
    if options.plot is not None:
        from bench.plot import plot

        for path in plot(cells, options.plot):
            console.print(f"picture: {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
