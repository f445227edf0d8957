"""Tile sizes of the backward, as data; read like those of `tiles.py`.

The two grouped GEMMs of the backward, and the gradients of both weights. The Hopper rows were
measured on an H200; the portable ones are sizes that fit everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tmoe.kernels.launch import architecture, next_power_of_2
from tmoe.kernels.tiles import DESCRIBED, INVARIANT_ROWS, Tile


@dataclass(frozen=True, slots=True)
class GradientTile:
    """One program's share of a weight gradient: block_n × block_d of an expert's matrix, block_s
    rows at a time.

    `group_n` rows of tiles sweep the columns together. `copies_out`: the result goes through a
    descriptor where it can, as the rows come.
    """

    block_n: int
    block_d: int
    block_s: int
    num_warps: int
    num_stages: int
    group_n: int = 8
    copies_out: bool = False


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """The tiles of a layer's backward, and the layers that they are for."""

    d_activated: Tile  # dy · down
    d_rows: Tile  # d_hidden · gate_up
    weights: GradientTile
    max_rows: float = math.inf  # rows per expert, on average
    max_intermediate: float = math.inf  # I

    def __post_init__(self) -> None:
        assert self.d_activated.block_m == self.d_rows.block_m, "one list of row tiles serves both"


_PRODUCTS = Tile(128, 256, 64, 8, 3, persistent=True)
# With some hundred rows an expert's gradient is mostly stores: two programs of a multiprocessor
# take turns. With more, one product of 128 × 256 keeps the tensor cores fed; of narrow experts
# (Qwen3's, at 1024 rows) not yet. As many programs as there are multiprocessors, each walking
# through several tiles, lost everywhere.
_MANY_STORES = GradientTile(128, 128, 32, 4, 5, copies_out=True)
_MANY_ROWS = GradientTile(128, 256, 64, 8, 3, copies_out=True)
HOPPER_BACKWARD = (
    BackwardTiles(Tile(16, 128, 128, 4, 3), Tile(16, 128, 128, 4, 3), _MANY_STORES, 8),
    BackwardTiles(Tile(64, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4), _MANY_STORES, 48),
    BackwardTiles(_PRODUCTS, _PRODUCTS, _MANY_STORES, 768),
    BackwardTiles(_PRODUCTS, _PRODUCTS, _MANY_STORES, 1024, max_intermediate=1024),
    BackwardTiles(_PRODUCTS, _PRODUCTS, _MANY_ROWS),
)
PORTABLE_BACKWARD = (
    BackwardTiles(
        Tile(16, 64, 64, 4, 3), Tile(16, 64, 64, 4, 3), GradientTile(64, 128, 32, 4, 2), 16
    ),
    BackwardTiles(
        Tile(128, 128, 32, 8, 3), Tile(128, 128, 32, 8, 3), GradientTile(128, 128, 32, 8, 3)
    ),
)
FLOAT32_BACKWARD = (
    BackwardTiles(Tile(64, 64, 16, 8, 2), Tile(64, 64, 16, 8, 2), GradientTile(64, 64, 16, 8, 2)),
)
INTERPRETER_BACKWARD = (
    BackwardTiles(Tile(16, 64, 64, 4, 2), Tile(16, 64, 64, 4, 2), GradientTile(64, 64, 16, 4, 2)),
)


def choose_backward_tiles(
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows_per_expert: float,
    intermediate: int,
    described: bool = True,
    batch_invariant: bool = False,
) -> BackwardTiles:
    """The tiles of the backward of experts with `intermediate` columns that get so many rows on
    average."""
    rows = INVARIANT_ROWS if batch_invariant else rows_per_expert
    table = backward_tile_table(device, dtype, described=described)
    return next(t for t in table if rows <= t.max_rows and intermediate <= t.max_intermediate)


def factor_gradient_tile(rows: int, columns: int, dtype: torch.dtype) -> GradientTile:
    """For the gradient of an adapter's factor, (E, rows, columns), one of which is its rank: no
    wider than 64 there. Measured on an H200 at rank 16, of Qwen3's layer with 256 and 1024 rows per
    expert: of seven others none was faster with both."""
    thin = min(max(next_power_of_2(min(rows, columns)), 16), 64)
    wide, steps = (128, 64) if dtype.itemsize < 4 else (64, 16)
    sides = (thin, wide) if rows <= columns else (wide, thin)
    return GradientTile(*sides, steps, 4, 3 if dtype.itemsize < 4 else 2)


def backward_tile_table(
    device: torch.device, dtype: torch.dtype, *, described: bool = True
) -> tuple[BackwardTiles, ...]:
    """The same as `tile_table`, for the backward."""
    name = architecture(device)
    if name == "interpreter":
        return INTERPRETER_BACKWARD
    if dtype.itemsize > 2:
        return FLOAT32_BACKWARD
    return HOPPER_BACKWARD if described and name in DESCRIBED else PORTABLE_BACKWARD
