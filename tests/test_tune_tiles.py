"""The search for tiles: what it tries, that a tile reaches the kernels, that it checks."""

from __future__ import annotations

import io
import json

import pytest
import torch

from bench import tune_tiles
from bench.tile_candidates import candidates
from tests.reference import quantized
from tmoe.bench.shapes import GPU_SHAPES, GPU_TOKENS, TINY
from tmoe.formats import SCHEMES
from tmoe.kernels import grouped_gemm as gemm
from tmoe.kernels.tiles import Tile
from tmoe.shapes import random_weights

LOW, LOW_WIDE = Tile(16, 32, 32, 4, 2), Tile(16, 64, 32, 4, 2)
HIGH = Tile(32, 32, 32, 4, 2)


def test_search_takes_the_best_of_one_projection_beside_the_best_of_the_other():
    cost = {LOW: 4.0, LOW_WIDE: 1.0, HIGH: 2.0}
    asked = []

    def time(pair):
        asked.append(pair)
        return 20.0 if pair is None else 10 * cost[pair.gate_up] + cost[pair.down]

    times = tune_tiles.search([LOW, LOW_WIDE, HIGH], [LOW, LOW_WIDE, HIGH], time)
    us, best = times[0]
    assert us == 11.0 and (best.gate_up, best.down) == (LOW_WIDE, LOW_WIDE)
    assert [us for us, _ in times] == sorted(us for us, _ in times)
    assert (20.0, None) in times and len(times) == len(set(asked)) == len(asked) == 5


def test_search_goes_on_where_the_gpu_has_no_room():
    times = tune_tiles.search([LOW, LOW_WIDE], [LOW], lambda pair: float("inf") if pair else 7.0)
    assert times[0] == (7.0, None)


@pytest.mark.parametrize("scheme", ["bf16", *SCHEMES])
def test_every_layer_has_candidates_for_both_projections(scheme):
    for shape in GPU_SHAPES:
        for tokens in GPU_TOKENS:
            gate_up, down = candidates(scheme, tokens * shape.top_k / shape.num_experts)
            assert {tile.block_m for tile in gate_up} & {tile.block_m for tile in down}
            assert len({*gate_up}) == len(gate_up) and len({*down}) == len(down)
            if scheme == "fp8_block":
                assert all(tile.block_d <= 128 for tile in (*gate_up, *down))


@pytest.mark.parametrize("scheme", ["bf16", "mxfp4_a16"])
def test_tune(scheme, monkeypatch, device):
    """Every candidate is launched, checked, and written down."""
    launched = set()

    def run_once(calls, device):
        calls[0]()
        return float(len(launched))

    def remember(out, a, w, order, tile, **more):
        launched.add(tile)
        return gemm.grouped_gemm(out, a, w, order, tile, **more)

    step = 128 if scheme == "mxfp4_a16" else 32
    gate_up = [Tile(16, 32, step, 4, 2), Tile(16, 64, step, 4, 2)]
    down = [Tile(16, 16, step, 4, 2), Tile(32, 16, step, 4, 2)]
    monkeypatch.setattr(tune_tiles, "candidates", lambda *_: (gate_up, down))
    monkeypatch.setattr(tune_tiles, "time_us", run_once)
    for module in ("triton_backend", "triton_quantized"):
        monkeypatch.setattr(f"tmoe.backends.{module}.grouped_gemm", remember)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = random_weights(TINY, device, dtype)
    if scheme != "bf16":
        weights = [quantized(w, SCHEMES[scheme].weights[0]) for w in weights]
    log = io.StringIO()
    times = tune_tiles.tune(TINY, 1, scheme, weights, log)
    assert {*gate_up, down[0]} <= launched and down[1] not in launched
    rows = [json.loads(line) for line in log.getvalue().splitlines()]
    assert len(rows) == len(times) == 3 and "gate_up" not in rows[0]
    assert rows[1]["gate_up"]["block_n"] == 32 and rows[1]["scheme"] == scheme


def test_a_wrong_result_is_not_recommended(monkeypatch, device):
    monkeypatch.setattr(tune_tiles, "candidates", lambda *_: ([LOW], [LOW]))
    monkeypatch.setattr(tune_tiles, "time_us", lambda calls, device: 1.0)
    monkeypatch.setattr(
        "tmoe.backends.triton_backend.combine", lambda rows, slots, out: out.fill_(1.0)
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with pytest.raises(AssertionError, match="error"):
        tune_tiles.tune(TINY, 1, "bf16", random_weights(TINY, device, dtype), io.StringIO())
