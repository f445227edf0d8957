"""The tiles that `bench.training_products` tries.

All compile for a Hopper GPU without spilled registers, but for what a kept result costs gate_up.
"""

from __future__ import annotations

from dataclasses import replace

from tmoe.kernels.backward_tiles import GradientTile
from tmoe.kernels.tiles import Tile

PRODUCTS = (
    Tile(128, 256, 64, 8, 3, persistent=True),
    Tile(128, 256, 64, 8, 4, persistent=True),
    Tile(128, 256, 64, 8, 3, 4, persistent=True),
    Tile(128, 256, 64, 8, 3, 16, persistent=True),
    Tile(128, 256, 64, 8, 3, 32, persistent=True),
    Tile(128, 256, 64, 8, 4, 16, persistent=True),
    Tile(128, 256, 64, 8, 3),
    Tile(128, 256, 32, 8, 5, persistent=True),
    Tile(128, 128, 64, 8, 4, persistent=True),
    Tile(128, 128, 64, 4, 4),
    Tile(256, 128, 64, 8, 3, persistent=True),
)
GRADIENTS = (
    GradientTile(128, 128, 32, 4, 5, copies_out=True),
    GradientTile(128, 128, 64, 4, 3, copies_out=True),
    GradientTile(128, 256, 64, 8, 3, copies_out=True),
    GradientTile(128, 256, 64, 8, 4, copies_out=True),
    GradientTile(128, 256, 64, 8, 3, 4, copies_out=True),
    GradientTile(128, 256, 64, 8, 3, 16, copies_out=True),
    GradientTile(128, 256, 64, 8, 3, 32, copies_out=True),
    GradientTile(128, 256, 64, 8, 4, 16, copies_out=True),
    GradientTile(128, 256, 32, 8, 5, copies_out=True),
    GradientTile(256, 128, 64, 8, 3, copies_out=True),
    GradientTile(128, 256, 64, 8, 3),
)
FROZEN = (
    Tile(64, 128, 32, 4, 3),
    Tile(64, 128, 64, 4, 3),
    Tile(128, 128, 32, 8, 3),
    Tile(128, 128, 64, 8, 2),
    Tile(128, 128, 64, 8, 3),
    Tile(128, 128, 64, 4, 2),
    Tile(128, 256, 32, 8, 2),
    Tile(128, 256, 64, 8, 2),
)


def as_gated(tile: Tile) -> Tile:
    """As many rows of a gated weight: half of them are up rows."""
    return replace(tile, block_n=tile.block_n // 2)


def through_tiles(columns: int) -> list[Tile]:
    """For products with a factor of so many columns."""
    sizes = ((64, 4, 2), (64, 4, 4), (128, 4, 3), (128, 4, 4), (256, 4, 2), (256, 8, 3))
    return [Tile(128, columns, depth, warps, stages) for depth, warps, stages in sizes]


def factor_tiles(thin: int, turned: bool) -> list[GradientTile]:
    """For the gradient of a factor; `turned`: its columns are the rank."""
    sizes = ((64, 64, 4, 4), (128, 32, 4, 5), (128, 64, 4, 5), (128, 128, 4, 3), (256, 64, 4, 4),
             (256, 64, 8, 3))  # fmt: skip
    return [
        GradientTile(*((wide, thin) if turned else (thin, wide)), steps, warps, stages)
        for wide, steps, warps, stages in sizes
    ]
