"""Tile sizes of the grouped GEMM, as data.

A `Tile` says what one program computes and how. Both projections of a layer share `block_m`, since
they share one list of row tiles. A table is read top down: the first row that fits is taken. The
Hopper rows were measured on an H200 (`bench/`); where nothing was measured, the portable ones are
sizes that fit everywhere (64 KiB of shared memory on AMD's gfx942, 99 KiB on sm_120).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from tmoe.kernels.launch import architecture


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share of a grouped GEMM: block_m rows × block_n columns, block_d of the depth
    at a time.

    For a gated projection block_n counts the activated columns: block_n gate and block_n up
    columns. `group_m` row tiles sweep the columns together. `persistent`: as many programs as the
    GPU has multiprocessors, each taking tile after tile, so that one tile's stores overlap the next
    one's loads. `specialized`: by `fp8_blocks.py`, whose warps have different jobs.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    persistent: bool = False
    specialized: bool = False

    @property
    def halves_tails(self) -> bool:
        """Whether an expert's last rows get a tile of half the height where that is enough.

        With some 256 rows per expert this saves a tenth of the arithmetic. Two kinds of tiles in
        one persistent loop would not be pipelined, so there it is off.
        """
        return self.block_m >= 128 and not self.persistent and not self.specialized


@dataclass(frozen=True, slots=True)
class LayerTiles:
    """The tiles of a layer's two projections, and the layers that they are for."""

    gate_up: Tile
    down: Tile
    max_rows: float = math.inf  # rows per expert, on average
    max_intermediate: float = math.inf  # I
    min_intermediate: int = 0

    @property
    def take_one_token(self) -> bool:
        """Whether the rows of a single token can stay in the order of its slots."""
        tiles = (self.gate_up, self.down)
        return not any(tile.persistent or tile.specialized for tile in tiles)

    def __post_init__(self) -> None:
        assert self.gate_up.block_m == self.down.block_m, "one list of row tiles serves both"


# Few rows: the weights stream by once, and a tile only has to keep enough bytes in flight: wide
# steps of the depth, and 8 rows, with which the weights are the tensor cores' left operand. Narrow
# experts (TP shards) make few tiles, so theirs are narrower, and at a middling height their short
# sums (D = I) gain from a persistent down projection. Many rows: 128 × 256 products keep the tensor
# cores busy, and a program that goes on to the next tile has its first numbers loaded when it comes
# to it. That is worth more than tails of half the height, unless an expert has few tiles: up to 192
# rows, and where its sums are long (large I) up to 320.
HOPPER = (
    LayerTiles(Tile(8, 32, 256, 4, 4), Tile(8, 256, 64, 8, 4), 5, max_intermediate=256),
    LayerTiles(Tile(8, 32, 256, 4, 4), Tile(8, 64, 256, 4, 3), 5),
    LayerTiles(Tile(16, 64, 128, 4, 4), Tile(16, 128, 128, 4, 3), 8),
    LayerTiles(Tile(32, 64, 128, 4, 3), Tile(32, 128, 128, 4, 3), 24),
    LayerTiles(
        Tile(64, 128, 64, 4, 5),
        Tile(64, 256, 64, 4, 4, persistent=True),
        48,
        max_intermediate=1024,
    ),
    LayerTiles(Tile(64, 128, 64, 4, 5), Tile(64, 128, 64, 4, 4), 48),
    LayerTiles(Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3, persistent=True), 192),
    LayerTiles(Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 8, 4), 320, min_intermediate=8192),
    LayerTiles(
        Tile(128, 128, 64, 8, 4, persistent=True), Tile(128, 256, 64, 8, 3, persistent=True)
    ),
)
# Not measured. Without the last two: with gpt-oss' activation its gate_up would spill registers.
BLACKWELL = (*HOPPER[:-3], replace(HOPPER[-3], max_rows=math.inf))
PORTABLE = (
    LayerTiles(Tile(16, 32, 64, 4, 3), Tile(16, 64, 64, 4, 3), 16),
    LayerTiles(Tile(64, 64, 32, 4, 3), Tile(64, 128, 32, 4, 3), 64),
    LayerTiles(Tile(128, 64, 32, 8, 3), Tile(128, 128, 32, 8, 3)),
)
FLOAT32 = (
    LayerTiles(Tile(16, 32, 32, 4, 2), Tile(16, 64, 32, 4, 2), 16),
    LayerTiles(Tile(64, 32, 16, 8, 2), Tile(64, 64, 16, 8, 2)),
)
INTERPRETER = (LayerTiles(Tile(16, 32, 64, 4, 2), Tile(16, 64, 64, 4, 2)),)

# In the tables for codes the rows for 13 to 24 rows per expert, and for 9 to 24 where codes are
# decoded, are what their neighbours suggest, not measured. The one for pairs was measured.

# e4m3 times e4m3: half the bytes and twice the rate of bf16, so the depth goes by twice as much.
HOPPER_FP8 = (
    LayerTiles(Tile(8, 32, 256, 4, 4), Tile(8, 256, 128, 8, 3), 5, max_intermediate=256),
    LayerTiles(Tile(8, 64, 256, 4, 4), Tile(8, 64, 256, 4, 4), 5),
    LayerTiles(Tile(16, 64, 256, 4, 4), Tile(16, 128, 128, 4, 4), 12),
    LayerTiles(Tile(32, 64, 128, 4, 4), Tile(32, 128, 128, 4, 4), 24),
    LayerTiles(Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 4, 3), 48),
    LayerTiles(Tile(128, 128, 128, 8, 4), Tile(128, 256, 128, 8, 3, persistent=True), 192),
    LayerTiles(Tile(128, 128, 128, 8, 4), Tile(128, 128, 128, 8, 4), 320, min_intermediate=8192),
    LayerTiles(Tile(128, 128, 128, 8, 4), Tile(128, 256, 128, 8, 3, persistent=True)),
)
# With scales for 128 of the depth a step has sums of its own beside the total, hence half the tile.
# Three such programs share a multiprocessor: while one applies scales, another multiplies. Narrow
# experts again have tiles of their own: a down projection of one or two steps wants wide ones.
HOPPER_FP8_BLOCKS = (
    LayerTiles(Tile(8, 32, 128, 4, 6), Tile(8, 128, 128, 4, 4), 1 / 4, max_intermediate=2048),
    LayerTiles(Tile(8, 32, 128, 4, 6), Tile(8, 64, 128, 4, 6), 1 / 4),
    LayerTiles(Tile(8, 32, 128, 4, 6), Tile(8, 128, 128, 4, 4), 2, min_intermediate=512),
    LayerTiles(Tile(16, 64, 128, 4, 6), Tile(16, 128, 128, 4, 4), 5, max_intermediate=256),
    LayerTiles(Tile(8, 32, 128, 2, 6), Tile(8, 128, 128, 4, 6), 5),
    LayerTiles(Tile(16, 128, 128, 4, 4), Tile(16, 128, 128, 4, 4), 12),
    LayerTiles(Tile(32, 64, 128, 4, 4), Tile(32, 128, 128, 4, 4), 24),
    LayerTiles(Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 4, 3), 48, max_intermediate=1024),
    LayerTiles(Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 4, 4), 96),
    LayerTiles(Tile(64, 64, 128, 4, 3, group_m=32), Tile(64, 128, 128, 4, 3, group_m=32)),
)
# Specialised warps have tiles of one size: twice as high and wide, for which half as much is read
# from L2. As many row tiles go together as share an expert's weights, so that these are read once.
HOPPER_FP8_BLOCKS_SPECIALIZED = (
    *HOPPER_FP8_BLOCKS[:-2],
    replace(HOPPER_FP8_BLOCKS[-2], max_rows=48),
    LayerTiles(
        Tile(128, 128, 128, 4, 4, group_m=16, specialized=True),
        Tile(128, 256, 128, 4, 4, group_m=16, specialized=True),
    ),
)
# Other codes become bf16 on the way, which takes more time than to load them: where there are few
# rows, small programs are many at once; with more rows each number serves more of them.
HOPPER_DECODED = (
    LayerTiles(Tile(8, 32, 128, 4, 4), Tile(8, 32, 256, 2, 4), 1 / 8),
    LayerTiles(Tile(8, 32, 128, 2, 4), Tile(8, 64, 128, 2, 4), 8),
    LayerTiles(Tile(16, 64, 128, 4, 4), Tile(16, 128, 128, 4, 4), 24),
    LayerTiles(Tile(64, 128, 64, 4, 3), Tile(64, 128, 64, 4, 3), 64),
    LayerTiles(Tile(128, 64, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
)
# e2m1 codes become bf16 in pairs. Below 64 rows two warps are best, whose own instructions take the
# weights from registers: four would multiply together, from shared memory.
HOPPER_DECODED_PAIRS = (
    LayerTiles(Tile(8, 32, 128, 2, 4), Tile(8, 32, 128, 2, 6), 1 / 8),
    LayerTiles(Tile(8, 32, 128, 2, 4), Tile(8, 64, 128, 2, 3), 6),
    LayerTiles(Tile(16, 64, 128, 2, 3), Tile(16, 128, 128, 2, 3), 18),
    LayerTiles(Tile(64, 128, 64, 8, 4), Tile(64, 128, 64, 4, 3), 64),
    LayerTiles(Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 4, 3, group_m=16)),
)
# The same with scales for 128 of the depth: no wider steps, and sums of their own for each.
HOPPER_DECODED_BLOCKS = (
    *HOPPER_DECODED[1:3],
    LayerTiles(Tile(64, 128, 64, 8, 3), Tile(64, 128, 64, 4, 3), 64),
    LayerTiles(Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
)
# Block-scaled units of compute capability 10 multiply 128 rows at a time. Compiled, not measured.
BLACKWELL_SCALED = (
    LayerTiles(
        Tile(128, 64, 128, 4, 3, persistent=True), Tile(128, 128, 128, 4, 3, persistent=True)
    ),
)
QUANTIZED_PORTABLE = (
    LayerTiles(Tile(16, 32, 128, 4, 2), Tile(16, 64, 128, 4, 2), 16),
    LayerTiles(Tile(64, 32, 128, 4, 2), Tile(64, 64, 128, 4, 2)),
)
QUANTIZED_INTERPRETER = (LayerTiles(Tile(16, 32, 128, 4, 2), Tile(16, 64, 128, 4, 2)),)
QUANTIZED_BY_KIND = {
    "fp8": HOPPER_FP8,
    "fp8 blocks": HOPPER_FP8_BLOCKS,
    "fp8 blocks, specialized": HOPPER_FP8_BLOCKS_SPECIALIZED,
    "decoded": HOPPER_DECODED,
    "decoded pairs": HOPPER_DECODED_PAIRS,
    "decoded blocks": HOPPER_DECODED_BLOCKS,
    "block-scaled": BLACKWELL_SCALED,
}

DESCRIBED = {"sm_90": HOPPER, "sm_100": BLACKWELL, "sm_103": BLACKWELL}
INVARIANT_ROWS = 32  # whose tiles serve every batch when a token's bits must not depend on it


def low_rank_tile(block_m: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """For products with one factor of an adapter: up to 64 columns in a tile.

    Measured on an H200 at rank 16, of Qwen3's layer with 256 and 1024 rows per expert: four stages
    take 0.78 to 0.97 of the time of two, which fit everywhere."""
    columns = 16
    while columns < min(rank, 64):
        columns *= 2
    if dtype.itemsize == 4:
        return Tile(block_m, columns, 16, 8, 2)
    return Tile(block_m, columns, 64, 4, 4 if architecture(device) == "sm_90" else 2)


def frozen_gradient_tile(
    block_m: int, dtype: torch.dtype, format: str, device: torch.device
) -> Tile:
    """For `frozen_gradient`, whose steps take `block_d` rows of codes apart.

    Measured on an H200 in fp8_block, mxfp4 and nvfp4, of Qwen3's layer with 1024 rows per expert:
    its two products take 0.94, 0.85 and 0.66 of the time of the portable tile. Other formats have
    the tile of fp8_block."""
    if dtype.itemsize == 4:
        return Tile(block_m, 64, 16, 8, 2)
    if block_m < 128:
        return Tile(block_m, 128, 32, 4, 3)
    if architecture(device) != "sm_90":
        return Tile(block_m, 128, 64, 8, 2)
    return Tile(block_m, 128, 64, 8, 3) if format == "mxfp4" else Tile(block_m, 128, 64, 4, 2)


def tile_table(
    device: torch.device, dtype: torch.dtype, *, described: bool = True
) -> tuple[LayerTiles, ...]:
    """The table for this GPU and dtype. `described`: the weights can be read by descriptors."""
    name = architecture(device)
    if name == "interpreter":
        return INTERPRETER
    if dtype.itemsize > 2:
        return FLOAT32
    return DESCRIBED.get(name, PORTABLE) if described else PORTABLE


def choose_tiles(
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows_per_expert: float,
    intermediate: int,
    described: bool = True,
    batch_invariant: bool = False,
) -> LayerTiles:
    """The tiles for experts with `intermediate` columns that get so many rows on average."""
    table = tile_table(device, dtype, described=described)
    return _first_that_fits(table, rows_per_expert, intermediate, batch_invariant)


def _first_that_fits(
    table: tuple[LayerTiles, ...], rows: float, intermediate: int, batch_invariant: bool
) -> LayerTiles:
    rows = INVARIANT_ROWS if batch_invariant else rows
    return next(
        tiles
        for tiles in table
        if rows <= tiles.max_rows
        and tiles.min_intermediate <= intermediate <= tiles.max_intermediate
    )


def quantized_tile_table(device: torch.device, kind: str) -> tuple[LayerTiles, ...]:
    """The table for this GPU and what it does with codes: "fp8" multiplies e4m3 by e4m3, "fp8
    blocks" with scales for 128 of the depth (and "specialized" warps), "block-scaled" codes with
    their scales, "decoded", "decoded pairs" (of e2m1) and "decoded blocks" make numbers of the
    weights' codes."""
    name = architecture(device)
    if name == "interpreter":
        return QUANTIZED_INTERPRETER
    return QUANTIZED_BY_KIND[kind] if name in DESCRIBED else QUANTIZED_PORTABLE


def choose_quantized_tiles(
    device: torch.device,
    kind: str,
    *,
    rows_per_expert: float,
    intermediate: int,
    batch_invariant: bool = False,
) -> LayerTiles:
    """The same for experts with quantised weights."""
    table = quantized_tile_table(device, kind)
    return _first_that_fits(table, rows_per_expert, intermediate, batch_invariant)
