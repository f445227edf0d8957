"""Look for better rows for `kernels/tiles.py`, on a GPU:

    python -m bench.tune_tiles --shapes mixtral-8x7b --tokens 128 --schemes bf16 fp8_block

For each layer, scheme and number of tokens it times the whole layer: with the tiles that the table
chooses now, then, for each height of the row tiles, with one candidate after the other for the
first projection and, beside the best of them, for the second. The fastest are checked. Every time
goes to the file as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TextIO
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

import tmoe
from bench.tile_candidates import candidates
from tmoe.bench.cases import num_inputs, with_backend
from tmoe.bench.reference import check_experts, check_quantized_experts, quantized
from tmoe.bench.shapes import GPU_SHAPES, GPU_TOKENS, SHAPES, routed_inputs
from tmoe.demo.timing import median_ms
from tmoe.formats import SCHEMES
from tmoe.kernels.tiles import LayerTiles, Tile
from tmoe.shapes import MoEShape, random_weights

Time = tuple[float, LayerTiles | None]  # microseconds; None: as chosen now


@contextmanager
def with_tiles(tiles: LayerTiles | None) -> Iterator[None]:
    """The Triton backend takes these tiles, whatever its tables say; None: what they say."""
    if tiles is None:
        yield
        return
    with mock.patch("tmoe.backends.triton_tiles.Tiles.choose", lambda *_, **__: tiles):
        yield


def time_us(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Microseconds per call; infinite for a tile that this GPU has no room for."""
    try:
        return 1e3 * median_ms(calls, device, repeats=8)
    except OutOfResources:
        return float("inf")


def search(
    gate_up: Sequence[Tile], down: Sequence[Tile], time: Callable[[LayerTiles | None], float]
) -> list[Time]:
    """Times of the tiles of now and of pairs, fastest first."""
    times: list[Time] = [(time(None), None)]
    for height in sorted({tile.block_m for tile in gate_up} & {tile.block_m for tile in down}):
        firsts = [tile for tile in gate_up if tile.block_m == height]
        seconds = [tile for tile in down if tile.block_m == height]
        tried: list[Time] = []
        for pair in (LayerTiles(first, seconds[0]) for first in firsts):
            tried.append((time(pair), pair))
        best = min(tried, key=itemgetter(0))[1]
        for pair in (LayerTiles(best.gate_up, second) for second in seconds[1:]):
            tried.append((time(pair), pair))
        times += tried
    return sorted(times, key=itemgetter(0))


def tune(
    shape: MoEShape, num_tokens: int, scheme: str, weights: Sequence[Tensor], log: TextIO
) -> list[Time]:
    """Try all candidates for one layer at one number of tokens, and print the best."""
    device = weights[0].device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    is_quantized = scheme != "bf16"
    inputs = [
        routed_inputs(shape, num_tokens, device, dtype, seed=seed)
        for seed in range(num_inputs(num_tokens))
    ]
    experts = with_backend(tmoe.fused_experts, "triton")
    layer = partial(experts, scheme=scheme) if is_quantized else experts
    calls = [partial(layer, x, *weights, w, ids) for x, w, ids in inputs]

    def time(tiles: LayerTiles | None) -> float:
        with with_tiles(tiles):
            us = time_us(calls, device)
        cell = {"shape": shape.name, "tokens": num_tokens, "scheme": scheme, "us": us}
        pair = {} if tiles is None else {n: asdict(getattr(tiles, n)) for n in ("gate_up", "down")}
        log.write(json.dumps(cell | pair) + "\n")
        log.flush()
        return us

    rows_per_expert = num_tokens * shape.top_k / shape.num_experts
    times = search(*candidates(scheme, rows_per_expert), time)
    print(f"\n{shape.name}, {scheme}, T = {num_tokens}, {rows_per_expert:.3g} rows per expert")
    x, topk_weights, ids = inputs[0]
    for us, tiles in times[:3]:
        with with_tiles(tiles):
            got = calls[0]()
        if is_quantized:
            check_quantized_experts(got, x, *weights, topk_weights, ids, scheme, {})
        else:
            check_experts(got, x, *weights, topk_weights, ids)
        names = ("as chosen now",) if tiles is None else (tiles.gate_up, tiles.down)
        print(f"{us:9.1f} µs", *names, sep="\n    ")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tune_tiles", description=__doc__)
    names = [shape.name for shape in GPU_SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=names)
    parser.add_argument("--tokens", nargs="+", type=int, default=GPU_TOKENS)
    parser.add_argument("--schemes", nargs="+", choices=("bf16", *SCHEMES), default=["bf16"])
    parser.add_argument("--out", type=Path, default=Path("tiles.jsonl"))
    options = parser.parse_args()
    torch.manual_seed(0)
    with options.out.open("w") as log:
        for name in options.shapes:
            plain = random_weights(SHAPES[name], torch.device("cuda"), torch.bfloat16)
            for scheme in options.schemes:
                weights = plain
                if scheme != "bf16":
                    weights = [quantized(w, SCHEMES[scheme].weights[0]) for w in plain]
                for num_tokens in options.tokens:
                    tune(SHAPES[name], num_tokens, scheme, weights, log)
            del plain, weights  # gigabytes: free them before the next layer


if __name__ == "__main__":
    main()
