"""Tiles as the store names them, and the tiles that tuning tries."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

import tmoe.backends.triton_candidates as module
import tmoe.kernels.tiles as tables
from tmoe.backends.triton_tiles import (
    Way,
    can_run,
    fastest,
    parse_tiles,
    parse_way,
    tiles_name,
)
from tmoe.dispatch.known import machine_with, model_layer, problem_of
from tmoe.formats import SCHEMES
from tmoe.kernels.tiles import QUANTIZED_BY_KIND, LayerTiles, Tile

TILE = Tile(16, 32, 64, 4, 2)
PLAIN = {"sm_90": tables.HOPPER, "sm_120": tables.PORTABLE, "gfx942": tables.PORTABLE}
ROOM = {"sm_90": 232448, "sm_120": 101376, "gfx942": 65536}  # bytes of shared memory
KIND_OF = {"bf16": "plain", "fp8_tensor": "fp8", "fp8_block": "fp8 blocks, specialized"}
TOKENS = (1, 16, 128, 1024, 8192)


def problem(model="mixtral-8x7b", scheme="bf16", tokens=64, **more):
    layer = replace(model_layer(model), **more)
    scheme = None if scheme == "bf16" else scheme
    machine = machine_with("H200")
    return problem_of(
        layer, machine, num_tokens=tokens, dtype=torch.bfloat16, scheme=scheme
    )  # fmt: skip


def kind(scheme):
    return KIND_OF.get(scheme, "decoded")


@pytest.fixture(params=ROOM)
def architecture(request, monkeypatch):
    for place in (tables, module):
        monkeypatch.setattr(place, "architecture", lambda device: request.param)
    monkeypatch.setattr(module, "_shared_memory", lambda device: ROOM[request.param])
    return request.param


def all_tiles():
    for table in (tables.HOPPER, tables.PORTABLE, tables.FLOAT32, *QUANTIZED_BY_KIND.values()):
        for row in table:
            yield LayerTiles(row.gate_up, row.down)
            yield LayerTiles(row.down, row.down)


def test_a_name_is_read_as_what_it_was():
    for tiles in all_tiles():
        assert parse_tiles(tiles_name(tiles)) == tiles
    assert tiles_name(LayerTiles(TILE, TILE)) == "16x32x64 w4 s2"
    other = replace(TILE, num_stages=3, group_m=4, persistent=True)
    assert tiles_name(LayerTiles(TILE, other)) == "16x32x64 w4 s2 + 16x32x64 w4 s3 g4 persistent"


@pytest.mark.parametrize("field", [field.name for field in fields(Tile)])
def test_a_name_says_all(field):
    """A tile that differs in one thing has another name."""
    value = getattr(TILE, field)
    other = replace(TILE, **{field: not value if isinstance(value, bool) else 2 * value})
    assert tiles_name(LayerTiles(other, other)) != tiles_name(LayerTiles(TILE, TILE))
    assert parse_tiles(tiles_name(LayerTiles(other, other))).down == other


@pytest.mark.parametrize("kind", ["plain", *QUANTIZED_BY_KIND])
@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_way_is_read_as_what_it_was(kind, layout, interleaved):
    way = Way(kind, layout, interleaved)
    assert parse_way(way.name) == way
    assert parse_way(f"x{way.name}") is None


def test_the_way_of_weights():
    w = torch.zeros(2, 32, 64)
    assert Way.of("plain", (w, w), False) == Way("plain", "rows")
    assert Way.of("plain", (w, w.transpose(1, 2)), True) == Way("plain", "columns", True)
    assert Way.of("plain", (w, torch.zeros(2, 32, 63)), False) == Way("plain", "strided")


@pytest.mark.parametrize("scheme", ["bf16", *SCHEMES])
def test_every_row_of_the_tables_can_run(scheme, architecture):
    name = kind(scheme)
    table = PLAIN[architecture] if name == "plain" else (
        QUANTIZED_BY_KIND[name] if architecture == "sm_90" else tables.QUANTIZED_PORTABLE
    )  # fmt: skip
    p = problem(scheme=scheme)
    for row in table:
        assert can_run(row, Way(name, "rows"), p)
        assert module.fits(row, Way(name, "rows"), p, ROOM[architecture])


def test_what_the_kernels_refuse_is_not_run():
    p, blocks, plain = problem(), problem(scheme="fp8_block"), Way("plain", "rows")

    def runs(p, way, **change):
        tile = replace(TILE, **change)
        return can_run(LayerTiles(tile, tile), way, p)

    assert runs(p, plain) and runs(p, plain, block_d=256)
    assert runs(blocks, Way("fp8 blocks", "rows"), block_d=128)
    assert not runs(blocks, Way("fp8 blocks", "rows"), block_d=256)  # a step has one scale
    assert runs(p, plain, block_d=32) and not runs(blocks, Way("decoded", "rows"), block_d=32)
    assert not runs(p, Way("block-scaled", "rows"))  # those units take 128 rows
    assert not runs(p, plain, block_n=256)  # of gate and up: 512 rows of one box
    down_only = replace(p, op="grouped_gemm", activation=None)
    assert runs(down_only, plain, block_n=256)
    specialized = {"block_m": 128, "block_n": 128, "block_d": 128, "specialized": True}
    assert not runs(blocks, Way("fp8 blocks", "rows"), **specialized)
    assert runs(blocks, Way("fp8 blocks, specialized", "rows"), **specialized)


@pytest.mark.parametrize("scheme", ["bf16", *SCHEMES])
@pytest.mark.parametrize("op", ["fused_experts", "grouped_gemm"])
def test_candidates(scheme, op, architecture):
    """They fit and run, none comes twice or is what the problem gets anyway."""
    way, device = Way(kind(scheme), "rows"), torch.device("cuda")
    for model in ("mixtral-8x7b", "deepseek-v3", "gpt-oss-120b"):
        for tokens in TOKENS:
            p = replace(problem(model, scheme, tokens), op=op)
            rows, more = module.candidates(p, way, device)
            found = [(tiles.gate_up, tiles.down) for tiles in (*rows, *more)]
            assert len(more) >= 3 and len({*found}) == len(found)
            assert all(tiles.max_rows == float("inf") for tiles in rows)
            for tiles in (*rows, *more):
                assert can_run(tiles, way, p)
                assert module.fits(tiles, way, p, ROOM[architecture])
                assert parse_tiles(tiles_name(tiles)) == tiles
                assert op == "fused_experts" or tiles.gate_up == tiles.down
            own, _ = module._own_and_others(p, way, device)
            assert (own if op == "fused_experts" else (own[1], own[1])) not in found


def test_candidates_are_rows_of_similar_height_and_neighbours(architecture):
    rows, more = module.candidates(problem(tokens=1), Way("plain", "rows"), torch.device("cuda"))
    if architecture == "sm_90":
        assert {tiles.down.block_m for tiles in rows} == {8, 16, 32}
        own = (Tile(8, 32, 256, 4, 4), Tile(8, 64, 256, 4, 3))
        gate_ups = {tiles.gate_up for tiles in more if tiles.down == own[1]}
        assert Tile(8, 64, 256, 4, 3) not in gate_ups  # two steps from its own
        for change in ({"block_n": 16}, {"block_d": 128}, {"num_warps": 8}, {"num_stages": 3}):
            assert replace(own[0], **change) in gate_ups
        both = replace(own[0], block_d=128), replace(own[1], block_n=128)
        assert both in [(tiles.gate_up, tiles.down) for tiles in more]


def test_a_gpu_with_less_room_has_fewer_candidates(monkeypatch):
    for place in (tables, module):
        monkeypatch.setattr(place, "architecture", lambda device: "sm_90")
    counts = []
    for room in (65536, 163840, 232448):
        monkeypatch.setattr(module, "_shared_memory", lambda device, room=room: room)
        p = problem(tokens=1024)
        rows, more = module.candidates(p, Way("plain", "rows"), torch.device("cuda"))
        counts.append(len(rows) + len(more))
    assert counts[0] < counts[1] < counts[2]


def test_fastest_is_by_way():
    p, slow, fast = problem(), "16x32x64 w4 s2", "16x64x64 w4 s2"
    times = {
        "plain, rows: table": 1.0, f"plain, rows: {slow}": 0.9, f"plain, rows: {fast}": 0.8,
        "plain, columns: table": 1.0, f"plain, columns: {slow}": 0.99,
        f"plain, strided: {slow}": 3.0, "plain, rows: nonsense": 0.1,
    }  # fmt: skip
    best = fastest(p, times)
    assert {way: tiles_name(tiles) for way, tiles in best.items()} == {
        "plain, rows": fast, "plain, strided": slow,
    }  # fmt: skip
