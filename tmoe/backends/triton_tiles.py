"""Which tiles a call of the Triton kernels gets: tuned ones if there are some, else the tables'.

Tiles that were tuned for one way of multiplying serve no other: beside the sizes, a `Way` is what a
kernel is compiled for. The names under which times of tiles are kept begin with it:

    plain, rows: 16x64x128 w4 s4 + 16x128x128 w4 s3        gate_up + down, or one for both
    fp8 blocks, rows: table                                what `kernels/tiles.py` says
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.kernels.descriptors import can_describe
from tmoe.kernels.tiles import (
    QUANTIZED_BY_KIND,
    LayerTiles,
    Tile,
    choose_quantized_tiles,
    choose_tiles,
)

from ..dispatch.problem import Problem
from ..options import current

TABLE = "table"  # stands for the tiles that nobody tuned
MARGIN = 0.02  # by which tuned tiles must be faster than those: less is noise
PLAIN = "plain"  # weights of the rows' dtype; the other kinds are those of QUANTIZED_BY_KIND


class Way(NamedTuple):
    """How a call multiplies."""

    kind: str
    layout: str  # of the weights in memory: "rows" or "columns" beside each other, or "strided"
    interleaved: bool = False  # gate and up rows alternate

    @classmethod
    def of(cls, kind: str, weights: tuple[Tensor, ...], interleaved: bool) -> Way:
        if not all(can_describe(w) for w in weights):
            return cls(kind, "strided", interleaved)
        in_rows = all(w.stride(-1) == 1 for w in weights)
        return cls(kind, "rows" if in_rows else "columns", interleaved)

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.layout}{', interleaved' if self.interleaved else ''}"

    @property
    def is_known(self) -> bool:
        """Whether this version has it."""
        return self.kind == PLAIN or self.kind in QUANTIZED_BY_KIND


NONE: Mapping[str, LayerTiles] = MappingProxyType({})


class Tiles:
    """Tuned tiles by the names of ways."""

    def __init__(self, tuned: Mapping[str, LayerTiles] = NONE) -> None:
        self.tuned = tuned

    def choose(
        self,
        x: Tensor,
        weights: tuple[Tensor, ...],
        kind: str = PLAIN,
        *,
        rows_per_expert: float,
        intermediate: int,
        interleaved: bool = False,
    ) -> LayerTiles:
        """The tiles of a call. With batch_invariant, the tables' row that serves every batch."""
        invariant = current().batch_invariant
        if self.tuned and not invariant:
            tiles = self.tuned.get(Way.of(kind, weights, interleaved).name)
            if tiles is not None:
                return tiles
        described = kind != PLAIN or all(can_describe(w) for w in weights)
        return table_tiles(
            x.device, x.dtype, kind, rows_per_expert, intermediate,
            described=described, batch_invariant=invariant,
        )  # fmt: skip


class Probe(Tiles):
    """Takes the table's and notes what the call was like."""

    way: Way | None = None
    device = torch.device("cpu")

    def choose(
        self, x: Tensor, weights: tuple[Tensor, ...], kind: str = PLAIN, *,
        interleaved: bool = False, **sizes: Any,
    ) -> LayerTiles:  # fmt: skip
        self.way, self.device = Way.of(kind, weights, interleaved), x.device
        return super().choose(x, weights, kind, **sizes)


def table_tiles(
    device: torch.device, dtype: torch.dtype, kind: str, rows_per_expert: float, intermediate: int,
    *, described: bool = True, batch_invariant: bool = False,
) -> LayerTiles:  # fmt: skip
    """What `kernels/tiles.py` says."""
    if kind == PLAIN:
        return choose_tiles(
            device, dtype, rows_per_expert=rows_per_expert, intermediate=intermediate,
            described=described, batch_invariant=batch_invariant,
        )  # fmt: skip
    return choose_quantized_tiles(
        device, kind, rows_per_expert=rows_per_expert, intermediate=intermediate,
        batch_invariant=batch_invariant,
    )  # fmt: skip


def fastest(problem: Problem, times: Mapping[str, float]) -> dict[str, LayerTiles]:
    """By the name of each way that was tuned, its best tiles, where the table's aren't as good.

    What can't be read, or run by the kernels of this version, is as if it weren't there.
    """
    best: dict[str, tuple[float, LayerTiles]] = {}
    for name, ms in times.items():
        way_name, _, text = name.partition(": ")
        way, tiles = parse_way(way_name), parse_tiles(text)
        if way is None or tiles is None or not can_run(tiles, way, problem):
            continue
        if ms < (1 - MARGIN) * times.get(f"{way_name}: {TABLE}", float("inf")):
            if way_name not in best or ms < best[way_name][0]:
                best[way_name] = ms, tiles
    return {name: tiles for name, (_, tiles) in best.items()}


# names --------------------------------------------------------------------------------------------

_WAY = re.compile(r"(.+), (rows|columns|strided)(, interleaved)?")
_TILE = re.compile(
    r"(\d{1,4})x(\d{1,4})x(\d{1,4}) w(\d{1,2}) s(\d{1,2})"
    r"(?: g(\d{1,3}))?( persistent)?( specialized)?",
    re.ASCII,
)


def parse_way(name: str) -> Way | None:
    """The way of that name; None: this version has none."""
    match = _WAY.fullmatch(name)
    way = None if match is None else Way(match[1], match[2], match[3] is not None)
    return way if way is not None and way.is_known else None


def tile_name(tile: Tile) -> str:
    """128x256x64 w8 s3 g4 persistent: rows × columns × depth, warps, stages, and what is unusual"""
    name = f"{tile.block_m}x{tile.block_n}x{tile.block_d} w{tile.num_warps} s{tile.num_stages}"
    name += "" if tile.group_m == 8 else f" g{tile.group_m}"
    return name + " persistent" * tile.persistent + " specialized" * tile.specialized


def tiles_name(tiles: LayerTiles) -> str:
    """The tiles without the layers that they are for."""
    names = [tile_name(tiles.gate_up), tile_name(tiles.down)]
    return " + ".join(dict.fromkeys(names))


def parse_tiles(name: str) -> LayerTiles | None:
    """The tiles that `tiles_name` calls so; None if there are none."""
    found = [_parse_tile(part) for part in name.split(" + ")]
    tiles = [tile for tile in found if tile is not None]
    if len(tiles) < len(found) or tiles[0].block_m != tiles[-1].block_m:
        return None
    pair = LayerTiles(tiles[0], tiles[-1])
    return pair if tiles_name(pair) == name else None


def _parse_tile(name: str) -> Tile | None:
    match = _TILE.fullmatch(name)
    if match is None:
        return None
    *numbers, group, persistent, specialized = match.groups()
    return Tile(
        *map(int, numbers), int(group or 8), persistent is not None, specialized is not None
    )


# what the kernels can run -------------------------------------------------------------------------


def can_run(tiles: LayerTiles, way: Way, problem: Problem) -> bool:
    """Whether the kernels of this version take the tiles, if the GPU has room for them."""
    return all(
        _can_run(tile, way.kind, columns, problem.scheme is not None)
        for tile, columns in projections(tiles, problem)
    )


def projections(tiles: LayerTiles, problem: Problem) -> Iterator[tuple[Tile, int]]:
    """The tiles that a problem uses, each with the weight rows that it multiplies by."""
    if problem.op == "fused_experts":
        gated = problem.activation is None or problem.activation.gated
        yield tiles.gate_up, tiles.gate_up.block_n * (2 if gated else 1)
    yield tiles.down, tiles.down.block_n


def _can_run(tile: Tile, kind: str, columns: int, quantized: bool) -> bool:
    if tile.specialized:  # the kernel is written for these sizes
        rows = QUANTIZED_BY_KIND.get(kind, ())
        return any(_sizes(tile) in (_sizes(row.gate_up), _sizes(row.down)) for row in rows)
    # Steps over codes are never shorter in the tables: Triton fails to compile some that are.
    steps = range(64 if quantized else 16, 129 if "blocks" in kind else 257)
    return (
        all(_is_power_of_2(size) for size in (tile.block_m, columns, tile.block_d, tile.num_warps))
        and (tile.block_m == 128 if kind == "block-scaled" else 8 <= tile.block_m <= 256)
        and 16 <= columns <= 256  # the longest side of a box that a descriptor can have
        and tile.block_d in steps
        and 1 <= tile.num_warps <= 16
        and 1 <= tile.num_stages <= 8
        and 1 <= tile.group_m <= 64
    )


def _sizes(tile: Tile) -> tuple[int, int, int, int, bool]:
    return tile.block_m, tile.block_n, tile.block_d, tile.num_warps, tile.specialized


def _is_power_of_2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
