"""Each product of a training step by itself, with one tile after the other, on a GPU:

    python -m bench.training_products --shapes mixtral-8x7b --tokens 16384 --out products.json
    python -m bench.training_products --shapes qwen3-30b-a3b --tokens 4096 --rank 16

Beside every product stand torch's dense matmul of as many numbers and its grouped_mm, and where
rows are gathered on the way in, the product of permuted ones. With --rank R instead what adapters
add, with --scheme the gradient through codes. A result is checked against torch before it is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.product_candidates import (
    FROZEN,
    GRADIENTS,
    PRODUCTS,
    as_gated,
    factor_tiles,
    through_tiles,
)
from bench.script import command_of
from tmoe.backends.triton_quantized import weight_scales
from tmoe.bench.machine import machine_info
from tmoe.bench.reference import assert_matches, quantized
from tmoe.bench.roofline import matmul_tflops
from tmoe.bench.shapes import SHAPES, routed_inputs
from tmoe.bench.timing import seconds_per_call
from tmoe.formats import SCHEMES
from tmoe.kernels.backward_tiles import GradientTile, choose_backward_tiles, factor_gradient_tile
from tmoe.kernels.frozen_gradient import frozen_gradient
from tmoe.kernels.grouped_gemm import grouped_gemm
from tmoe.kernels.permute import permute
from tmoe.kernels.sort import SortedTokens, sort_tokens
from tmoe.kernels.tiles import Tile, choose_tiles, frozen_gradient_tile, low_rank_tile
from tmoe.kernels.weight_gradient import weight_gradient
from tmoe.shapes import MoEShape, random_weights

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
AnyTile = Tile | GradientTile


@dataclass(frozen=True)
class Product:
    """`run(tile)` computes all of it, `part` cuts the rows or the matrix of the checked expert out
    of the result, and `left` @ `right` is what that must be."""

    name: str
    run: Callable[[Any], Tensor]
    tiles: Sequence[AnyTile]  # first the one in use
    sizes: tuple[int, int, int]  # of the dense matmul with as many flops
    part: Callable[[Tensor], Tensor]
    left: Tensor
    right: Tensor
    grouped_mm: Callable[[], Tensor] | None = None  # the same by torch


class Layer:
    """A layer's tensors, and the orders of its rows by the height of the row tiles."""

    def __init__(self, shape: MoEShape, tokens: int) -> None:
        torch.manual_seed(0)
        self.shape, self.tokens = shape, tokens
        self.gate_up, self.down = random_weights(shape, DEVICE, DTYPE)
        self.x, self.weights, self.ids = routed_inputs(shape, tokens, DEVICE, DTYPE)
        self.dy = torch.randn_like(self.x)
        self.rows = tokens * shape.top_k
        self._orders: dict[int, SortedTokens] = {}
        order = self.order(128)
        bounds = order.expert_offsets.tolist()
        counts = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
        self.expert = counts.index(max(counts))
        self.own = slice(bounds[self.expert], bounds[self.expert + 1])
        self.x_rows, self.dy_rows = (
            permute(t.new_empty(self.rows, t.shape[1]), t, order) for t in (self.x, self.dy)
        )
        self.hidden = torch.randn_like(self.empty(self.gate_up.shape[1])) / 4
        self.activated = torch.randn_like(self.empty(shape.intermediate)) / 4

    def order(self, block_m: int) -> SortedTokens:
        if block_m not in self._orders:
            self._orders[block_m] = sort_tokens(
                self.ids, num_experts=self.shape.num_experts, block_m=block_m
            )
        return self._orders[block_m]

    def empty(self, columns: int) -> Tensor:
        return torch.empty(self.rows, columns, device=DEVICE, dtype=DTYPE)

    def rows_times(
        self, name: str, rows: Tensor, w: Tensor, tiles: Sequence[Tile], **how: Any
    ) -> Product:
        """rows · w[e].T; w (E, N, D) of any strides."""
        N, D = w.shape[1:]
        gated = how.get("gated", False)
        out, before = self.empty(N // 2 if gated else N), self.empty(N) if gated else None
        own = self.x_rows if rows is self.x else self.dy_rows if rows is self.dy else rows

        def run(tile: Tile) -> Tensor:
            order = self.order(tile.block_m)
            grouped_gemm(out, rows, w, order, tile, before=before, **how)
            return out if before is None else before

        ends = self.order(128).expert_offsets[1:]
        return Product(
            name,
            run,
            tiles,
            (self.rows, N, D),
            lambda y: y[self.own],
            own[self.own],
            w[self.expert].T,
            lambda: F.grouped_mm(own, w.transpose(1, 2), offs=ends),
        )

    def sum_of_rows(
        self, name: str, left: Tensor, right: Tensor, tiles: Sequence[GradientTile]
    ) -> Product:
        """(E, N, D)"""
        N, D = left.shape[1], right.shape[1]
        out = torch.empty(self.shape.num_experts, N, D, device=DEVICE, dtype=DTYPE)
        offsets = self.order(128).expert_offsets

        def run(tile: GradientTile) -> Tensor:
            return weight_gradient(out, left, right, offsets, tile)

        return Product(
            name,
            run,
            tiles,
            (N, D, self.rows),
            lambda y: y[self.expert],
            left[self.own].T,
            right[self.own],
            lambda: F.grouped_mm(left.T, right, offs=offsets[1:]),
        )

    def products(self) -> Iterator[Product]:
        E, I, columns = self.shape.num_experts, self.shape.intermediate, self.gate_up.shape[1]
        kind = {"rows_per_expert": self.rows / E, "intermediate": I}
        forward = choose_tiles(DEVICE, DTYPE, **kind)
        backward = choose_backward_tiles(DEVICE, DTYPE, **kind)
        gated = {"gated": True, "activation": "swiglu"} if columns > I else {"activation": "silu"}
        firsts = [forward.gate_up, *(as_gated(tile) for tile in PRODUCTS)]
        yield self.rows_times(
            "gate_up, gathered", self.x, self.gate_up, firsts, gather=True, **gated
        )
        yield self.rows_times("gate_up, permuted", self.x_rows, self.gate_up, firsts, **gated)
        yield self.rows_times("down", self.activated, self.down, [forward.down, *PRODUCTS])
        seconds = [backward.d_activated, *PRODUCTS]
        down, gate_up = self.down.transpose(1, 2), self.gate_up.transpose(1, 2)
        yield self.rows_times("d_activated, gathered", self.dy, down, seconds, gather=True)
        yield self.rows_times("d_activated, permuted", self.dy_rows, down, seconds)
        yield self.rows_times("d_rows", self.hidden, gate_up, [backward.d_rows, *PRODUCTS])
        thirds = [backward.weights, *GRADIENTS]
        yield self.sum_of_rows("d_down", self.dy_rows, self.activated, thirds)
        yield self.sum_of_rows("d_gate_up", self.hidden, self.x_rows, thirds)

    def of_adapters(self, rank: int) -> Iterator[Product]:
        E, H = self.down.shape[:2]
        a = torch.randn(E, rank, H, device=DEVICE).to(DTYPE)
        used = low_rank_tile(128, rank, DTYPE, DEVICE)
        yield self.rows_times(
            "rows · A, gathered", self.x, a, [used, *through_tiles(used.block_n)], gather=True
        )
        b = torch.randn(E, self.hidden.shape[1], rank, device=DEVICE).to(DTYPE)
        yield self.rows_times(
            "d_hidden · B", self.hidden, b.transpose(1, 2), [used, *through_tiles(used.block_n)]
        )
        low = torch.randn_like(self.empty(rank))
        for name, left, right in (("d_A", low, self.x_rows), ("d_B", self.hidden, low)):
            tile = factor_gradient_tile(left.shape[1], right.shape[1], DTYPE)
            turned = tile.block_d < tile.block_n
            tiles = [tile, *factor_tiles(min(tile.block_n, tile.block_d), turned), *GRADIENTS[:1]]
            yield self.sum_of_rows(name, left, right, tiles)

    def through_codes(self, scheme: str) -> Iterator[Product]:
        backward = choose_backward_tiles(
            DEVICE, DTYPE, rows_per_expert=self.rows / self.shape.num_experts,
            intermediate=self.shape.intermediate, described=False,
        )  # fmt: skip
        for name, rows, weight in (
            (f"dy · down in {scheme}", self.dy_rows, self.down),
            (f"d_hidden · gate_up in {scheme}", self.hidden, self.gate_up),
        ):
            q = quantized(weight, SCHEMES[scheme].weights[-1])
            N, D = q.shape[1:]
            out, scales = self.empty(D), weight_scales(q)

            def run(tile: Tile, rows=rows, q=q, out=out, scales=scales) -> Tensor:
                return frozen_gradient(
                    out, rows, q.data, self.order(tile.block_m), tile, scales=scales
                )

            used = frozen_gradient_tile(backward.d_rows.block_m, DTYPE, q.format, DEVICE)
            tiles = [used, *FROZEN]
            right = q[self.expert].dequantize(DTYPE)
            own = rows[self.own]
            yield Product(name, run, tiles, (self.rows, D, N), lambda y: y[self.own], own, right)


def measure(product: Product) -> Iterator[tuple[str, float]]:
    """The times of torch in microseconds, and that of each tile; infinite where it doesn't fit."""
    yield "torch's dense matmul", dense_us(*product.sizes)
    if product.grouped_mm is not None:
        yield "torch's grouped_mm", time_us(product.grouped_mm)
    wide = product.left.double() @ product.right.double()
    naive = product.left @ product.right
    for tile in dict.fromkeys(product.tiles):
        try:
            assert_matches(product.part(product.run(tile)), wide, naive)
            yield str(tile), time_us(lambda tile=tile: product.run(tile))
        except OutOfResources:
            yield str(tile), float("inf")


def dense_us(rows: int, columns: int, depth: int) -> float:
    a = torch.randn(rows, depth, device=DEVICE).to(DTYPE)
    b = torch.randn(columns, depth, device=DEVICE).to(DTYPE).T
    return time_us(lambda: a @ b)


def time_us(call: Callable[[], object]) -> float:
    return 1e6 * median(seconds_per_call([call], DEVICE))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.training_products", description=__doc__)
    parser.add_argument("--shapes", default="mixtral-8x7b")
    parser.add_argument("--tokens", default="16384")
    parser.add_argument("--only", help="products whose names begin so")
    parser.add_argument("--rank", type=int, help="of adapters: their products instead")
    parser.add_argument("--scheme", help="of codes: the gradient through them instead")
    parser.add_argument("--out", type=Path, help="write JSON here too, after every product")
    options = parser.parse_args()
    command = command_of("python -m bench.training_products", options.out)
    found: dict[str, Any] = {"machine_info": machine_info(DEVICE), "command": command, "rows": []}
    for name in options.shapes.split(","):
        for tokens in map(int, options.tokens.split(",")):
            print(f"{name} T={tokens}, torch's 8192³: {matmul_tflops(DEVICE, DTYPE):.0f} TFLOP/s")
            layer = Layer(SHAPES[name], tokens)
            products = layer.products()
            if options.rank:
                products = layer.of_adapters(options.rank)
            elif options.scheme:
                products = layer.through_codes(options.scheme)
            for product in products:
                if options.only and not product.name.startswith(options.only):
                    continue
                rows, columns, depth = product.sizes
                print(f"  {product.name} ({rows} × {columns} × {depth})")
                for tile, us in measure(product):
                    tflops = 2e-6 * rows * columns * depth / us
                    row = {"shape": name, "tokens": tokens, "product": product.name, "tile": tile}
                    found["rows"].append(row | {"us": us, "tflops": tflops})
                    print(f"    {us:9.1f} µs {tflops:5.0f} TFLOP/s  {tile}", flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            del layer, products, product
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
