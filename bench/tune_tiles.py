"""Look for better rows for `kernels/tiles.py`: `python -m bench.tune_tiles --out tiles.jsonl`.

For each layer and number of tokens it times both projections alone with every candidate tile that
suits the rows per expert, then the whole layer with the best pairs and with the tiles that the
table chooses now; the fastest are checked. Every time goes to the file as a line of JSON. Needs a
GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.cases import check_experts, num_inputs
from bench.shapes import GPU_SHAPES, GPU_TOKENS, SHAPES
from tmoe.demo.shapes import MoEShape, random_inputs, random_weights
from tmoe.demo.timing import median_ms
from tmoe.kernels.combine import combine
from tmoe.kernels.grouped_gemm import grouped_gemm
from tmoe.kernels.sort import SortedTokens, sort_tokens
from tmoe.kernels.tiles import Tile, choose_tiles

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
BEST = 6  # pairs of tiles that are timed as a whole layer

# (most rows per expert, candidates for gate_up, candidates for down)
CANDIDATES = (
    (
        16,
        [Tile(16, n, d, 4, s) for n, d, s in
         ((16, 256, 4), (32, 128, 4), (32, 128, 6), (32, 256, 4), (64, 64, 6), (64, 128, 4))]
        + [Tile(32, 64, 128, 4, 3)],
        [Tile(16, n, d, 4, s) for n, d, s in
         ((32, 256, 4), (64, 128, 4), (64, 128, 6), (64, 256, 3), (128, 64, 5), (128, 128, 3))]
        + [Tile(32, 128, 128, 4, 3)],
    ),
    (
        64,
        [Tile(m, n, d, 4, s) for m, n, d, s in
         ((32, 64, 128, 3), (32, 128, 64, 4), (64, 64, 64, 4), (64, 128, 64, 4), (64, 128, 64, 5))],
        [*(Tile(m, n, d, 4, s) for m, n, d, s in
           ((32, 128, 128, 3), (32, 128, 64, 5), (64, 128, 64, 4), (64, 256, 64, 3))),
         *(Tile(64, n, 64, 4, 4, persistent=True) for n in (128, 256))],
    ),
    (
        float("inf"),
        [Tile(64, 128, 64, 4, 4), Tile(64, 128, 64, 8, 4), Tile(128, 64, 64, 8, 4),
         *(Tile(128, 128, 64, 8, s, group_m=g) for s in (3, 4) for g in (4, 8, 16)),
         Tile(128, 128, 64, 8, 3, persistent=True)],
        [Tile(64, 256, 64, 4, 4, persistent=True), Tile(128, 128, 64, 8, 4, persistent=True),
         *(Tile(128, 256, 64, 8, s, persistent=p) for s in (3, 4) for p in (False, True))],
    ),
)  # fmt: skip


def gate_up(x: Tensor, weight: Tensor, order: SortedTokens, tile: Tile) -> Tensor:
    hidden = x.new_empty(order.row_to_slot.numel(), weight.shape[1] // 2)
    return grouped_gemm(
        hidden, x, weight, order, tile, gather=True, activation="swiglu", gated=True
    )


def down(
    hidden: Tensor, weight: Tensor, topk_weights: Tensor, order: SortedTokens, tile: Tile
) -> Tensor:
    rows = hidden.new_empty(hidden.shape[0], weight.shape[1])
    return grouped_gemm(rows, hidden, weight, order, tile, row_weight=topk_weights)


def layer(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, weights: tuple[Tensor, Tensor],
    gate_up_tile: Tile, down_tile: Tile,
) -> Tensor:  # fmt: skip
    """What `TritonBackend.fused_experts` does, with these tiles."""
    order = sort_tokens(topk_ids, num_experts=len(weights[0]), block_m=gate_up_tile.block_m)
    hidden = gate_up(x, weights[0], order, gate_up_tile)
    rows = down(hidden, weights[1], topk_weights, order, down_tile)
    return combine(rows, order.slot_to_row, torch.empty_like(x))


def time_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds per call; infinite for a tile that this GPU has no room for."""
    try:
        return 1e3 * median_ms(calls, DEVICE, repeats=8)
    except OutOfResources:
        return float("inf")


def tune(shape: MoEShape, num_tokens: int, weights: tuple[Tensor, Tensor], log: TextIO) -> None:
    """Time all candidates for one layer at one number of tokens, and print the best."""
    inputs = [
        random_inputs(shape, num_tokens, DEVICE, DTYPE) for _ in range(num_inputs(num_tokens))
    ]
    rows_per_expert = num_tokens * shape.top_k / shape.num_experts
    _, *candidates = next(row for row in CANDIDATES if rows_per_expert <= row[0])
    orders = {
        m: [sort_tokens(ids, num_experts=shape.num_experts, block_m=m) for _, _, ids in inputs]
        for m in {tile.block_m for tiles in candidates for tile in tiles}
    }
    hidden = torch.randn(num_tokens * shape.top_k, shape.intermediate, device=DEVICE).to(DTYPE)

    def write(what: str, us: float, **tiles: Tile) -> None:
        cell = {"shape": shape.name, "tokens": num_tokens, "what": what, "us": us}
        log.write(json.dumps(cell | {name: asdict(tile) for name, tile in tiles.items()}) + "\n")
        log.flush()

    times: dict[str, list[tuple[float, Tile]]] = {"gate_up": [], "down": []}
    for name, tiles in zip(times, candidates, strict=True):
        for tile in tiles:
            calls = [
                partial(gate_up, x, weights[0], order, tile)
                if name == "gate_up"
                else partial(down, hidden, weights[1], topk_weights, order, tile)
                for (x, topk_weights, _), order in zip(inputs, orders[tile.block_m], strict=True)
            ]
            times[name].append((time_us(calls), tile))
            write(name, times[name][-1][0], tile=tile)
    pairs = sorted(
        ((us + more, (tile, other))
         for (us, tile), (more, other) in product(*times.values())
         if tile.block_m == other.block_m),
        key=itemgetter(0),
    )  # fmt: skip

    chosen = choose_tiles(
        DEVICE, DTYPE, rows_per_expert=rows_per_expert, intermediate=shape.intermediate
    )
    now = (chosen.gate_up, chosen.down)
    layers = []
    for pair in dict.fromkeys([now, *(pair for _, pair in pairs[:BEST])]):
        calls = [partial(layer, *tensors, weights, *pair) for tensors in inputs]
        layers.append((time_us(calls), pair))
        write("layer", layers[-1][0], gate_up=pair[0], down=pair[1])
    layers.sort(key=itemgetter(0))

    print(f"\n{shape.name}, T = {num_tokens}, {rows_per_expert:.3g} rows per expert")
    for us, pair in layers[:3]:
        x, topk_weights, ids = inputs[0]
        check_experts(layer(*inputs[0], weights, *pair), x, *weights, topk_weights, ids)
        print(f"{us:9.1f} µs{'  (as chosen now)' if pair == now else ''}", *pair, sep="\n    ")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tune_tiles", description=__doc__)
    names = [shape.name for shape in GPU_SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=names)
    parser.add_argument("--tokens", nargs="+", type=int, default=GPU_TOKENS)
    parser.add_argument("--out", type=Path, default=Path("tiles.jsonl"))
    options = parser.parse_args()
    torch.manual_seed(0)
    with options.out.open("w") as log:
        for name in options.shapes:
            weights = random_weights(SHAPES[name], DEVICE, DTYPE)
            for num_tokens in options.tokens:
                tune(SHAPES[name], num_tokens, weights, log)
            del weights  # gigabytes: free them before the next layer


if __name__ == "__main__":
    main()
