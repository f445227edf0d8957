"""Reading what was measured: files of `tmoe bench`, of pytest-benchmark, and the recorded peers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checks import expect
from ..formats import SCHEMES
from .cases import OURS
from .cost_model import fitted, predict
from .roofline import ROOFS
from .shapes import ROUTINGS, SHAPES

RECORDED = Path(__file__).parent / "recorded"
PEER_LAYERS = (RECORDED / "peers_h200.json", RECORDED / "peers_h200_quantized.json")
PEER_OPERATIONS = RECORDED / "peers_h200_operations.json"
ROOFLINE = "roofline"
LAYERS = ("layer", "quantized_layer")  # operations

Key = tuple[str, str, int, str]


@dataclass(frozen=True, slots=True)
class Cell:
    """One layer at one number of tokens; times in microseconds."""

    scheme: str  # of quantised weights; otherwise the dtype
    shape: str
    tokens: int
    routing: str
    us: float
    floor_us: float
    tflops: float
    gbs: float
    peers: dict[str, float]  # peer -> time
    predicted_us: float | None  # None: nothing was fitted for this device, shape or scheme

    @property
    def intensity(self) -> float:
        """Flops per necessary byte."""
        return 1e3 * self.tflops / self.gbs

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


def read_results(paths: Iterable[Path]) -> dict[str, Any]:
    """One or more files of results as one; the machine is that of the first.

    Raises ``ValueError`` for a file that isn't one, and for files of different devices.
    """
    merged: dict[str, Any] = {}
    for path in paths:
        found = _json(path)
        ok = isinstance(found, dict) and {"benchmarks", "machine_info"} <= found.keys()
        ours = ok and {"device", "versions"} <= found["machine_info"].keys()
        wanted = "results of tmoe bench or pytest-benchmark with tmoe's cases"
        expect(ours, "read_results", str(path), wanted, "others")
        if not merged:
            merged = found | {"benchmarks": []}
        names = [file["machine_info"].get("device") for file in (merged, found)]
        expect(names[0] == names[1], "read_results", str(path), f"of {names[0]}", names[1])
        merged["benchmarks"] = [*merged["benchmarks"], *found["benchmarks"]]
    return merged


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"read_results: {path} can't be read: {error}") from error


def read_recorded(paths: Sequence[Path] = PEER_LAYERS) -> dict[str, Any]:
    """The recorded layers of all files as one. Raises ``ValueError`` if devices differ."""
    files = [_json(path) for path in paths]
    merged = files[0] | {"rows": []}
    for path, file in zip(paths, files, strict=True):
        same = file["device"] == merged["device"]
        expect(same, "read_recorded", str(path), f"of {merged['device']}", file["device"])
        merged["rows"] += [{"scheme": file.get("dtype")} | row for row in file["rows"]]
    return merged


def read_cells(results: dict[str, Any], recorded: dict[str, Any], backend: str) -> list[Cell]:
    """The layers that `backend` ran, each with its peers. Peers that were measured beside it count;
    others come from the record, if it is of the same device and dtype."""
    infos = [bench["extra_info"] for bench in results["benchmarks"]]
    layers = [info for info in infos if info.get("operation") in LAYERS]
    times: dict[Key, dict[str, float]] = {}
    if any(_same_conditions(info, recorded) for info in layers):
        for row in recorded["rows"]:
            times.setdefault(_key(row), {})[row["peer"]] = row["us"]
    for info in layers:
        if info["backend"] not in OURS:  # just measured: takes the place of what is recorded
            times.setdefault(_key(info), {})[info["backend"]] = info["us"]
    cells = [
        Cell(
            *_key(info), info["us"], info["floor_us"], info["tflops"], info["gbs"],
            times.get(_key(info), {}), _predicted(info),
        )
        for info in layers
        if info["backend"] == backend
    ]  # fmt: skip
    return sorted(cells, key=_order)


def _order(cell: Cell) -> tuple[int, int, int, int]:
    """As the tables of this package have them."""
    positions = [
        list(names).index(name) if name in names else len(names)
        for names, name in (
            (SCHEMES, cell.scheme), (SHAPES, cell.shape), (ROUTINGS, cell.routing)
        )
    ]  # fmt: skip
    scheme, shape, routing = positions
    return (-1 if cell.scheme not in SCHEMES else scheme, shape, routing, cell.tokens)


def _key(row: dict[str, Any]) -> Key:
    scheme = row.get("scheme") or row["dtype"]
    return scheme, row["shape"], row["tokens"], row.get("routing", "random")


def _same_conditions(info: dict[str, Any], recorded: dict[str, Any]) -> bool:
    return (info["device"], info["dtype"]) == (recorded["device"], recorded["dtype"])


def _predicted(info: dict[str, Any]) -> float | None:
    scheme = info.get("scheme", "bf16")
    known = info["shape"] in SHAPES and scheme in fitted() and info["backend"] == "triton"
    if not known or info["dtype"] != "bfloat16" or all(info["device"] != d for d, _ in ROOFS):
        return None
    options = {"scheme": scheme, "routing": info.get("routing", "random")}
    return predict(SHAPES[info["shape"]], info["tokens"], device=info["device"], **options).us


def picture_cells(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Name of a picture -> what it shows: a roofline per scheme, and each layer's time over tokens.
    Of random routing, which is what the floor and most peers are about."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.routing == "random":
            end = f"-{cell.scheme}" if cell.scheme in SCHEMES else ""
            for name in (ROOFLINE, cell.shape):
                found.setdefault(f"{name}{end}", []).append(cell)
    return found
