"""Experts placed by their load, on several GPUs: `torchrun --nproc-per-node 2 -m bench.placement`.

Every rank has T tokens of its own whose choices of experts are skewed, popularity r^-1.2. Which
experts are popular is drawn ("drawn"), or they are the first ones, which a placement in order puts
onto one rank ("together"). Their loads are counted on other tokens of the same kind; `balance`
places them; `rebalance` moves the weights of the layer that is in use. A row has the layer's time
in order and as placed, with no copies and with some, and what the cost model predicts for the
busiest rank's experts. Every result is compared with one GPU's, before and after moving.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tmoe
from bench.parallel import EXCHANGES, build, runnable
from bench.rank_times import graph_us
from bench.script import command_of, start_ranks, write_record
from tmoe.bench.shapes import SHAPES, ZIPF
from tmoe.parallel import Placement, balance, fixed_tokens, parallelize, rebalance
from tmoe.parallel.balance import rank_loads
from tmoe.parallel.expert_layers import divided_layers
from tmoe.parallel.rebalance import slots_of_layer
from tmoe.plan.gain import busiest_us
from tmoe.shapes import MoEShape

CALLS = 4
Inputs = tuple[Tensor, Tensor, Tensor]  # x, weights, ids


class Tokens:
    """Skewed choices of one popularity, cut into calls and ranks."""

    def __init__(self, shape: MoEShape, tokens: int, together: bool, device: torch.device) -> None:
        self.shape, self.tokens, self.device = shape, tokens, device
        size = (CALLS + 1) * tokens * dist.get_world_size()
        E, K = shape.num_experts, shape.top_k
        self.weights, self.ids = tmoe.simulate_routing(
            size, E, K, distribution="skewed", skew=ZIPF, seed=7, device="cpu"
        )
        if together:
            counts = torch.bincount(self.ids.flatten(), minlength=E)
            rank_of = torch.empty(E, dtype=torch.int32)
            rank_of[counts.argsort(descending=True, stable=True)] = torch.arange(
                E, dtype=torch.int32
            )
            self.ids = rank_of[self.ids.long()]

    def loads(self) -> Tensor:
        """Of the part that isn't timed."""
        seen = self.ids[CALLS * self.tokens * dist.get_world_size() :]
        return torch.bincount(seen.flatten(), minlength=self.shape.num_experts)

    def chances(self) -> list[float]:
        """That a token chooses an expert, over all."""
        counts = torch.bincount(self.ids.flatten(), minlength=self.shape.num_experts)
        return (counts.double() / len(self.ids)).tolist()

    def call(self, number: int, rank: int) -> Inputs:
        start = (number * dist.get_world_size() + rank) * self.tokens
        part = slice(start, start + self.tokens)
        random = torch.Generator(self.device).manual_seed(start)
        x = torch.randn(
            self.tokens, self.shape.hidden, device=self.device, generator=random
        ).bfloat16()
        return x, self.weights[part].to(self.device), self.ids[part].to(self.device)


def check(layer: Any, whole: Any, inputs: Inputs, what: str) -> None:
    x, weights, ids = inputs
    want = whole(x, ids, weights).float()
    off = ((layer(x, ids, weights).float() - want).norm() / want.norm()).item()
    assert off < 2**-7, f"{what} is {off} away from one GPU"


def spread(whole: Any, placement: Placement, exchange: str | None, mesh: Any) -> Any:
    layer = tmoe.Experts.__new__(tmoe.Experts)
    layer.__dict__ = dict(whole.__dict__)
    layer._parameters, layer._buffers = dict(whole._parameters), dict(whole._buffers)
    return parallelize(layer, mesh, ep="x", dp="x", placement=placement, exchange=exchange).eval()


def timed(layer: Any, whole: Any, mine: Sequence[Inputs], device: Any, what: str) -> float:
    with fixed_tokens():
        check(layer, whole, mine[0], what)
        return graph_us([lambda i=i: layer(i[0], i[2], i[1]) for i in mine], device)


def move(layer: Any, new: Placement, device: torch.device) -> tuple[float, int]:
    """Seconds that `rebalance` takes, and bytes that this rank receives."""
    rank = layer.parallel.layout.experts.rank
    ((held, _),) = divided_layers(layer).values()
    each = sum(
        part.nbytes // len(part)
        for tensor in slots_of_layer(held).values()
        for part in (tensor.parts() if isinstance(tensor, tmoe.QuantizedTensor) else [tensor])
    )
    dist.barrier()
    started = time.perf_counter()
    (moves,) = rebalance(layer, new, captured_anew=True).values()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, each * len(moves.into(rank))


def measure(
    shape: MoEShape, scheme: str, counts: list[int], copies: list[int], exchanges: list[str],
    mesh: Any, device: torch.device,
) -> list[dict[str, Any]]:  # fmt: skip
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = build(shape, scheme, device).eval()
    rows = []
    for kind in ("drawn", "together"):
        for T in counts:
            tokens = Tokens(shape, T, kind == "together", device)
            mine = [tokens.call(number, rank) for number in range(CALLS)]
            in_order = Placement.contiguous(shape.num_experts, size)
            for exchange in exchanges:
                layer = spread(whole, in_order, None, mesh)
                if not runnable(layer, exchange, T, shape.top_k):
                    continue
                layer.parallel.exchange = exchange
                for redundant in (None, *copies):
                    row = {"model": shape.name, "scheme": scheme, "popular": kind, "tokens": T,
                           "ranks": size, "exchange": exchange, "redundant": redundant}  # fmt: skip
                    placement = in_order
                    if redundant is not None:
                        placement = balance(tokens.loads(), size, redundant=redundant)
                    if redundant == 0:
                        placement = balance(tokens.loads(), size, current=in_order)
                        seconds, moved = move(layer, placement, device)
                        row |= {"rebalance_ms": 1e3 * seconds, "received_bytes": moved}
                    elif redundant is not None:
                        layer = spread(whole, placement, exchange, mesh)
                    loads = rank_loads(tokens.chances(), placement)
                    row["load_over_mean"] = max(loads) * size / sum(loads)
                    row["predicted_experts_us"] = busiest_us(
                        shape, T * size, placement, tokens.chances(), scheme
                    )
                    row["us"] = timed(layer, whole, mine, device, str(row))
                    rows.append(row)
                    if rank == 0:
                        print(json.dumps(row), flush=True)
    return rows


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__)
    parser.add_argument("--models", default="qwen3-30b-a3b")
    parser.add_argument("--schemes", default="bf16,fp8_block")
    parser.add_argument("--tokens", default="16,128,1024,8192")
    parser.add_argument("--redundant", default="0,4")
    parser.add_argument("--exchanges", default=",".join(EXCHANGES))
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args(arguments)
    device, mesh = start_ranks()
    counts, copies = ([int(text) for text in words.split(",")]
                      for words in (options.tokens, options.redundant))  # fmt: skip
    rows: list[Any] = []
    for model in options.models.split(","):
        for scheme in options.schemes.split(","):
            exchanges = options.exchanges.split(",")
            rows += measure(SHAPES[model], scheme, counts, copies, exchanges, mesh, device)
            if options.out is not None and dist.get_rank() == 0:
                command = command_of("torchrun -m bench.placement", options.out, arguments)
                write_record(options.out, device, command, rows=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
