"""What changed between two files of results, beyond noise.

A time is the median of its rounds, its spread (slowest - fastest round) / median. A cell has
changed if its time is longer or shorter by more than the sum of both spreads, and by more than
`LEAST`: the clock of a GPU differs by that from one session to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from .tables import Grid, Row, us_text

LEAST = 0.02

Key = tuple[str, str, str]  # group, backend, dtype


@dataclass(frozen=True, slots=True)
class Change:
    """One cell that both files have; microseconds."""

    group: str
    backend: str
    dtype: str
    before: float
    after: float
    noise: float  # relative

    @property
    def ratio(self) -> float:
        """Above 1: slower."""
        return self.after / self.before

    @property
    def is_real(self) -> bool:
        return max(self.ratio, 1 / self.ratio) - 1 > self.noise


@dataclass(frozen=True, slots=True)
class Changes:
    """All common cells, slowest first, and what only one file has."""

    cells: tuple[Change, ...]
    only_before: tuple[str, ...]  # groups
    only_after: tuple[str, ...]
    remarks: tuple[str, ...]  # what makes the files hard to compare

    @property
    def real(self) -> tuple[Change, ...]:
        return tuple(cell for cell in self.cells if cell.is_real)

    def slower_than(self, percent: float) -> tuple[Change, ...]:
        """Cells that changed, and by more than this."""
        return tuple(cell for cell in self.real if 100 * (cell.ratio - 1) > percent)

    @property
    def mean_ratio(self) -> float:
        return geometric_mean([cell.ratio for cell in self.cells])


def changes(before: dict[str, Any], after: dict[str, Any]) -> Changes:
    """Compare two files of results, cell by cell."""
    old, new = _by_key(before), _by_key(after)
    common = [key for key in old if key in new]
    cells = [
        Change(*key, _us(old[key]), _us(new[key]), _noise(old[key], new[key])) for key in common
    ]
    return Changes(
        tuple(sorted(cells, key=lambda cell: -cell.ratio)),
        tuple(key[0] for key in old if key not in new),
        tuple(key[0] for key in new if key not in old),
        tuple(_remarks(before["machine_info"], after["machine_info"])),
    )


def _by_key(results: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    found = {}
    for bench in results["benchmarks"]:
        info = bench["extra_info"]
        found[bench["group"], info["backend"], info["dtype"]] = bench
    return found


def _us(bench: dict[str, Any]) -> float:
    return float(bench["extra_info"]["us"])


def _noise(*benches: dict[str, Any]) -> float:
    stats = [bench["stats"] for bench in benches]
    return max(LEAST, sum((stat["max"] - stat["min"]) / stat["median"] for stat in stats))


def _remarks(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    found = []
    for name in ("device", "driver"):
        if before.get(name) != after.get(name):
            found.append(f"{name}: {before.get(name)} before, {after.get(name)} after")
    old, new = before["versions"], after["versions"]
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            found.append(f"{name}: {old.get(name, 'none')} before, {new.get(name, 'none')} after")
    clocks = [_clock(before), _clock(after)]
    if max(clocks) / min(clocks) - 1 > LEAST:
        found.append(
            f"torch's matmul ran at {clocks[0]:.0f} TFLOP/s before and at {clocks[1]:.0f} after: "
            "the clocks differ by more than any small change"
        )
    return found


def _clock(machine: dict[str, Any]) -> float:
    start = machine["matmul_tflops_at_start"]
    return float(min(start, machine.get("matmul_tflops_at_end", start)))


def changes_table(found: Changes, *, everything: bool = False) -> Grid:
    """What changed, slowest first; with `everything`, also what is within the noise."""
    shown = found.cells if everything else found.real
    rows = [
        Row(
            (f"{cell.group}, {cell.backend}", us_text(cell.before), us_text(cell.after))
            + (f"{cell.ratio:.3f}", f"±{100 * cell.noise:.1f} %", _verdict(cell)),
            marked=cell.is_real and cell.ratio > 1,
        )
        for cell in shown
    ]
    columns = ("what", "before, µs", "after, µs", "after / before", "noise", "")
    return Grid("beyond noise" if not everything else "all common cells", columns, tuple(rows))


def _verdict(cell: Change) -> str:
    if not cell.is_real:
        return "same"
    return "slower" if cell.ratio > 1 else "faster"
