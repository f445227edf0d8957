"""The tile tables: what every layer can count on, whatever its sizes."""

from __future__ import annotations

import math

import pytest
import torch

import tmoe.kernels.backward_tiles as backward_tiles
import tmoe.kernels.tiles as tiles_module
from tmoe.kernels.backward_tiles import (
    FLOAT32_BACKWARD,
    HOPPER_BACKWARD,
    INTERPRETER_BACKWARD,
    PORTABLE_BACKWARD,
    choose_backward_tiles,
    factor_gradient_tile,
)
from tmoe.kernels.tiles import (
    BLACKWELL,
    FLOAT32,
    HOPPER,
    INTERPRETER,
    PORTABLE,
    QUANTIZED_BY_KIND,
    QUANTIZED_INTERPRETER,
    QUANTIZED_PORTABLE,
    LayerTiles,
    Tile,
    choose_tiles,
)

QUANTIZED = {"portable codes": QUANTIZED_PORTABLE, **QUANTIZED_BY_KIND}
TABLES = {
    "Hopper": HOPPER,
    "Blackwell": BLACKWELL,
    "portable": PORTABLE,
    "fp32": FLOAT32,
    "interpreter": INTERPRETER,
    **QUANTIZED,
}
ROWS = [0.0, 0.1, 1, 15.9, 16, 16.1, 32, 48, 48.5, 64, 65, 256, 1e6]
WIDTHS = [1, 96, 255, 256, 257, 768, 2048, 14336, 10**6]


@pytest.fixture(params=TABLES)
def table(request, monkeypatch):
    """`choose_tiles` with this table, on any device."""
    table = TABLES[request.param]
    monkeypatch.setattr(tiles_module, "tile_table", lambda *_, **__: table)
    return table


def choose(rows: float, width: int, **keywords) -> LayerTiles:
    device = torch.device("cpu")
    return choose_tiles(
        device, torch.bfloat16, rows_per_expert=rows, intermediate=width, **keywords
    )


def test_every_layer_finds_a_row(table):
    for rows in ROWS:
        for width in WIDTHS:
            assert isinstance(choose(rows, width), LayerTiles)


def test_more_rows_never_get_a_lower_tile(table):
    for width in WIDTHS:
        heights = [choose(rows, width).down.block_m for rows in ROWS]
        assert heights == sorted(heights)


def test_both_projections_share_their_row_tiles(table):
    for row in table:
        assert row.gate_up.block_m == row.down.block_m
    low, high = Tile(16, 32, 32, 4, 2), Tile(32, 32, 32, 4, 2)
    with pytest.raises(AssertionError, match="one list"):
        LayerTiles(low, high)


def test_batch_invariant_tiles_do_not_depend_on_the_rows(table):
    for width in WIDTHS:
        assert len({choose(rows, width, batch_invariant=True) for rows in ROWS}) == 1


def test_a_table_ends_with_a_row_for_everything(table):
    assert (table[-1].max_rows, table[-1].max_intermediate) == (math.inf, math.inf)
    assert [row.max_rows for row in table] == sorted(row.max_rows for row in table)


def test_sizes_that_tensor_cores_and_descriptors_take(table):
    for row in table:
        for tile in (row.gate_up, row.down):
            if tile.specialized:
                assert tile.block_m == tile.block_d == 128
                assert tile.block_n == (128 if tile is row.gate_up else 256)
                continue
            for size in (tile.block_m, tile.block_n, tile.block_d):
                assert 8 <= size <= 256 and size & (size - 1) == 0
            assert tile.num_warps in (2, 4, 8) and tile.num_stages >= 2 and tile.group_m >= 1


@pytest.mark.parametrize("name", QUANTIZED)
def test_steps_of_quantised_weights_meet_their_scales(name):
    """A step lies within a block of 128 or holds whole ones; block-scaled units take 128 rows."""
    for row in QUANTIZED[name]:
        for tile in (row.gate_up, row.down):
            assert tile.block_d % 32 == 0
            assert tile.block_d <= 128 or name in ("fp8", "decoded")
            assert tile.block_m == 128 or name != "block-scaled"


def test_which_table_serves_which_codes(monkeypatch):
    def table(name, kind):
        monkeypatch.setattr(tiles_module, "architecture", lambda device: name)
        return tiles_module.quantized_tile_table(torch.device("cpu"), kind)

    for kind, wanted in QUANTIZED_BY_KIND.items():
        assert table("sm_90", kind) is wanted and table("sm_100", kind) is wanted
        assert table("sm_120", kind) is table("gfx942", kind) is QUANTIZED_PORTABLE
        assert table("interpreter", kind) is QUANTIZED_INTERPRETER


def test_which_table_serves_which_gpu(monkeypatch):
    """Weights that no descriptor can hold get the portable tiles, and so does an unknown GPU."""

    def table(name: str, dtype: torch.dtype, described: bool = True):
        monkeypatch.setattr(tiles_module, "architecture", lambda device: name)
        return tiles_module.tile_table(torch.device("cpu"), dtype, described=described)

    for dtype in (torch.float16, torch.bfloat16):
        assert table("sm_90", dtype) is HOPPER
        assert table("sm_100", dtype) is table("sm_103", dtype) is BLACKWELL
        for name in ("sm_80", "sm_86", "sm_120", "gfx942"):
            assert table(name, dtype) is PORTABLE
        assert table("sm_90", dtype, described=False) is PORTABLE
        assert table("interpreter", dtype) is INTERPRETER
    assert table("sm_90", torch.float32) is FLOAT32
    assert table("interpreter", torch.float32) is INTERPRETER


def test_tails_are_halved_where_a_tile_is_high_and_a_program_has_one():
    def halves(block_m: int, persistent: bool) -> bool:
        return Tile(block_m, 64, 64, 4, 3, persistent=persistent).halves_tails

    assert halves(128, False) and not halves(128, True) and not halves(64, False)


@pytest.mark.parametrize("rows_per_expert", [4, 1000, 1024, 1025])
def test_tiles_of_the_backward(rows_per_expert, monkeypatch):
    """Every layer finds a row; weight gradients of narrow experts have smaller tiles for longer."""
    for table in (HOPPER_BACKWARD, PORTABLE_BACKWARD, FLOAT32_BACKWARD, INTERPRETER_BACKWARD):
        monkeypatch.setattr(backward_tiles, "backward_tile_table", lambda *_, t=table, **__: t)
        narrow, wide = (
            choose_backward_tiles(
                torch.device("cpu"),
                torch.bfloat16,
                rows_per_expert=rows_per_expert,
                intermediate=intermediate,
            )
            for intermediate in (768, 14336)
        )
        larger = wide.weights.block_d > narrow.weights.block_d
        assert larger == (table is HOPPER_BACKWARD and 768 < rows_per_expert <= 1024)


@pytest.mark.parametrize("rank, side", [(1, 16), (16, 16), (17, 32), (64, 64), (300, 64)])
def test_tiles_of_an_adapters_factors(rank, side):
    for dtype, wide in ((torch.bfloat16, 128), (torch.float32, 64)):
        a = factor_gradient_tile(rank, 4096, dtype)
        b = factor_gradient_tile(4096, rank, dtype)
        assert (a.block_n, a.block_d) == (side, wide) == (b.block_d, b.block_n)
