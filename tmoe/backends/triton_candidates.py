"""Tiles worth timing for a problem: other rows of its table, and neighbours of the row it gets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch
import triton

from tmoe.kernels.launch import architecture
from tmoe.kernels.tiles import LayerTiles, Tile, quantized_tile_table, tile_table

from ..dispatch.problem import Problem
from .triton_tiles import PLAIN, Way, can_run, projections, table_tiles

FARTHEST = 4  # times as high, or as low, as the table's: tiles beyond have never been near the best
MOST_SUMS = 128  # registers of a thread that hold sums; half of them where steps have their own

Pair = tuple[Tile, Tile]  # gate_up, down


def candidates(
    problem: Problem, way: Way, device: torch.device
) -> tuple[list[LayerTiles], list[LayerTiles]]:
    """Tiles for `problem` beside its own row, all different: other rows, and neighbours.

    Of neighbours there are all pairs: each half is compiled once, and a time is soon taken.
    """
    own, rows = _own_and_others(problem, way, device)
    interpreted = architecture(device) == "interpreter"
    gate_ups, downs = ((tile, *_neighbours(tile, interpreted)) for tile in own)
    pairs: Iterable[Pair] = product(gate_ups, downs)
    if problem.op == "grouped_gemm":  # one projection, which the tables have under down
        rows = [(down, down) for _, down in rows]
        pairs = ((down, down) for down in downs)
        own = own[1], own[1]
    room, seen = _shared_memory(device), {own}

    def new(some: Iterable[Pair]) -> Iterator[LayerTiles]:
        for pair in some:
            tiles = LayerTiles(*pair)
            if (
                pair not in seen
                and can_run(tiles, way, problem)
                and fits(tiles, way, problem, room)
            ):
                seen.add(pair)
                yield tiles

    return [*new(rows)], [*new(pairs)]


def _own_and_others(problem: Problem, way: Way, device: torch.device) -> tuple[Pair, list[Pair]]:
    """The row of the table that the problem gets, and those of similar height."""
    described = way.layout != "strided"
    rows_per_expert = problem.tokens * problem.top_k / problem.num_experts
    own = table_tiles(
        device, problem.dtype, way.kind, rows_per_expert, problem.intermediate, described=described
    )
    table = (
        tile_table(device, problem.dtype, described=described)
        if way.kind == PLAIN
        else quantized_tile_table(device, way.kind)
    )
    height = own.down.block_m
    return (own.gate_up, own.down), [
        (row.gate_up, row.down)
        for row in table
        if height / FARTHEST <= row.down.block_m <= height * FARTHEST
    ]


def _neighbours(tile: Tile, interpreted: bool) -> Iterator[Tile]:
    """One size halved or doubled; a stage more or less; the other way to go through the tiles."""
    names = [] if tile.specialized else ["block_n", "block_d"]
    if not interpreted:
        names += [] if tile.specialized else ["num_warps"]
        names += ["group_m"] if tile.block_m >= 64 else []  # else there is little to sweep
    for name in names:
        for value in (getattr(tile, name) // 2, getattr(tile, name) * 2):
            yield replace(tile, **{name: value})
    if interpreted:
        return
    for stages in (tile.num_stages - 1, tile.num_stages + 1):
        yield replace(tile, num_stages=stages)
    if tile.block_m >= 64 and not tile.specialized:
        yield replace(tile, persistent=not tile.persistent)


def fits(tiles: LayerTiles, way: Way, problem: Problem, room: float) -> bool:
    """Whether so many bytes of shared memory hold all stages, and registers the sums.

    Only what a GPU says is certain; this saves the compiling of what it would refuse.
    """
    size = problem.dtype.itemsize
    a_size = 1 if way.kind.startswith(("fp8", "block-scaled")) else size
    w_size = size if way.kind == PLAIN else 1
    most_sums = MOST_SUMS // (2 if "blocks" in way.kind else 1)
    for tile, columns in projections(tiles, problem):
        step = tile.block_d * (tile.block_m * a_size + columns * w_size)
        sums = tile.block_m * columns / (32 * tile.num_warps)
        if not tile.specialized and (step * tile.num_stages > room or sums > most_sums):
            return False
    return True


def _shared_memory(device: torch.device) -> float:
    """Bytes that a program can have."""
    if architecture(device) == "interpreter":
        return math.inf
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    room: int = properties["max_shared_mem"]
    return room
