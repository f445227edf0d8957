"""An expert layer on several GPUs: `torchrun --nproc-per-node 2 -m bench.parallel --out FILE`.

Every rank has T tokens of its own and its part of the experts (dp + ep). For each layer, scheme and
T: the layer on one GPU with the tokens of all, the exchanges, the experts alone on what an exchange
brings them (of each call those of the rank that takes longest), and the exchange alone. From these:

    scaling   time of one GPU with everybody's tokens / time of all GPUs together
    share     of the time that isn't experts'
    overhead  time of a call less that of its experts, in microseconds

The exchange that writes into others' memory runs where it can. Of a model with a shared expert the
whole layer is timed too: with that expert on a stream of its own, without, and without the expert.

Times are the GPU's own, of a CUDA graph of several calls with inputs of their own; every result is
compared with one GPU's before it is timed. NVLink multicast is switched off. Beside them stands
what NCCL alone takes for the same bytes.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tmoe
from bench.overlap import SHARED, with_and_without, with_shared
from bench.rank_times import eager_us, graph_us, nccl_us
from bench.script import command_of, start_ranks, write_record
from tmoe.bench.shapes import SHAPES, routed_inputs
from tmoe.parallel import fixed_tokens, parallelize
from tmoe.parallel.choose import ROUTE
from tmoe.parallel.codes import codes_of
from tmoe.parallel.local import Rows
from tmoe.parallel.messages import Tokens

CALLS = 8
EXCHANGES = ("all_gather", "all_to_all", "symmetric_memory")


def build(shape: Any, scheme: str, device: torch.device) -> tmoe.Experts:
    """The whole layer, the same on all ranks."""
    torch.manual_seed(0)
    E, H, I = shape.num_experts, shape.hidden, shape.intermediate
    with device:
        experts = tmoe.Experts(E, H, I, dtype=torch.bfloat16)
    experts.requires_grad_(False)
    return experts if scheme == "bf16" else tmoe.Experts.quantized(experts, scheme)


def part(whole: tmoe.Experts, mesh: Any, exchange: str | None) -> tmoe.Experts:
    """A rank's part, beside the whole one."""
    layer = copy.copy(whole)
    layer._parameters, layer._buffers = dict(whole._parameters), dict(whole._buffers)
    return parallelize(layer, mesh, ep="x", dp="x", exchange=exchange)


def rows_for_experts(layer: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> Rows:
    """What an exchange brings to this rank's experts."""
    seen = []

    def see(rows: Rows, dtype: torch.dtype) -> Tensor:
        tokens = Tokens.of(rows.x)
        x = tokens.like(kept(tokens.x), None if tokens.scale is None else kept(tokens.scale))
        seen.append(Rows(x, kept(rows.weights), kept(rows.slots), rows.first, rows.num_slots))
        return zeros(rows, dtype)

    x, weights, ids = inputs
    layer.parallel.run(x, weights, ids, see, None, codes_of(layer), trained=False)
    return seen[0]


def experts_us(layer: Any, brought: list[Rows], device: torch.device) -> float:
    """The experts alone, in each call those of the rank that takes longest: ranks meet after every
    call, and what meeting takes is taken off again."""
    one = torch.zeros(1, device=device)

    def meet() -> None:
        dist.all_reduce(one)

    def compute(rows: Rows) -> None:
        layer.local_experts(rows, torch.float32)
        meet()

    both = graph_us([lambda r=r: compute(r) for r in brought], device)
    return both - graph_us([meet] * len(brought), device)


def kept(part: Tensor) -> Tensor:
    """A copy with the same strides: what it stands in may be written by the next call."""
    return torch.empty_strided(
        part.shape, part.stride(), dtype=part.dtype, device=part.device
    ).copy_(part)


def runnable(layer: Any, name: str, tokens: int, top_k: int) -> bool:
    """Whether the exchange can run here at all."""
    with fixed_tokens():
        candidates = layer.explain_exchange(tokens, top_k).candidates
    return any(found.name == name and found.accepted for found in candidates)


def zeros(rows: Rows, dtype: torch.dtype) -> Tensor:
    """What experts that compute nothing say."""
    return torch.zeros(rows.x.shape, dtype=dtype, device=rows.x.device)


def measure(
    shape: Any, scheme: str, counts: list[int], mesh: Any, device: Any,
    exchanges: Sequence[str] = EXCHANGES,
) -> list[Any]:  # fmt: skip
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = build(shape, scheme, device)
    parts = {name: part(whole, mesh, None) for name in exchanges}
    rows = []
    for T in counts:
        layers = {n: one for n, one in parts.items() if runnable(one, n, T, shape.top_k)}
        for name, layer in layers.items():
            layer.parallel.exchange = name
        every = [
            [
                routed_inputs(shape, T, device, torch.bfloat16, seed=100 * call + r)
                for r in range(size)
            ]
            for call in range(CALLS if T <= 1024 else 3)
        ]
        joint = [tuple(torch.cat(parts) for parts in zip(*each, strict=True)) for each in every]
        mine = [each[rank] for each in every]
        row = {"model": shape.name, "scheme": scheme, "tokens": T, "ranks": size}
        x, weights, ids = joint[0]
        want = whole(x, ids, weights)[rank * T : (rank + 1) * T].float()
        row["one_us"] = graph_us([lambda i=i: whole(i[0], i[2], i[1]) for i in joint], device)
        for name, layer in layers.items():
            with fixed_tokens():
                x, weights, ids = mine[0]
                got = layer(x, ids, weights).float()
                off = ((got - want).norm() / want.norm()).item()
                assert off < 2**-7, f"{name} is {off} away from one GPU at T={T}"
                row[f"{name}_us"] = graph_us(
                    [lambda i=i, n=layer: n(i[0], i[2], i[1]) for i in mine], device
                )
                brought = [rows_for_experts(layer, i) for i in mine]
                row[f"{name}_experts_us"] = experts_us(layer, brought, device)
                nothing = [zeros(r, torch.float32) for r in brought]
                coded = codes_of(layer)
                row[f"{name}_exchange_us"] = graph_us(
                    [
                        lambda i=i, z=z, n=layer, c=coded: n.parallel.run(
                            *i, lambda rows, dtype: z, None, c, trained=False
                        )
                        for i, z in zip(mine, nothing, strict=True)
                    ],
                    device,
                )
                if shape.name in SHARED:
                    full = with_shared(shape, layer, SHARED[shape.name], device)
                    beside = with_and_without(
                        full,
                        [(x, ids) for x, _, ids in mine],
                        lambda calls: graph_us(calls, device),
                    )
                    row |= {f"{name}_{what}": us for what, us in beside.items()}
            if T <= 128:  # as Python calls it
                row[f"{name}_eager_us"] = eager_us(
                    lambda i=mine[0], n=layer: n(i[0], i[2], i[1]), device
                )
        codes = codes_of(whole)
        token = 2 * shape.hidden if codes is None else codes.row_bytes(shape.hidden)
        row["row_bytes"] = token + ROUTE * shape.top_k
        row |= nccl_us(T, row["row_bytes"], shape.hidden, device)
        rows.append(row)
        if rank == 0:
            say(row)
    return rows


def say(row: dict[str, Any]) -> None:
    text = (
        "{model:16} {scheme:9} T={tokens:<5} one {one_us:8.1f}  nccl {nccl_us:7.1f}, "
        "to all {nccl_to_all_us:7.1f}, to others {nccl_to_others_us:7.1f}"
    ).format(**row)
    for name in (name for name in EXCHANGES if f"{name}_us" in row):
        total, experts, alone = (row[f"{name}{what}_us"] for what in ("", "_experts", "_exchange"))
        scaling, over = row["one_us"] / total, total - experts
        text += (
            f"  | {name} {total:8.1f} (experts {experts:8.1f}, alone {alone:7.1f}) "
            f"x{scaling:.2f} +{over:.1f}"
        )
        if f"{name}_eager_us" in row:
            text += f" eager {row[f'{name}_eager_us']:.0f}"
        if f"{name}_beside_us" in row:
            text += " shared expert beside {:.1f}, in turn {:.1f}, without {:.1f}".format(
                *(row[f"{name}_{what}_us"] for what in ("beside", "in_turn", "routed"))
            )
    print(text, flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.parallel", description=__doc__)
    parser.add_argument("--models", default="deepseek-v3,qwen3-30b-a3b")
    parser.add_argument("--schemes", default="bf16,fp8_block")
    parser.add_argument("--tokens", default="1,16,128,1024,8192")
    parser.add_argument("--exchanges", default=",".join(EXCHANGES))
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    device, mesh = start_ranks()
    counts = [int(text) for text in options.tokens.split(",")]
    rows: list[Any] = []
    for model in options.models.split(","):
        for scheme in options.schemes.split(","):
            exchanges = options.exchanges.split(",")
            rows += measure(SHAPES[model], scheme, counts, mesh, device, exchanges)
            torch.cuda.empty_cache()
            if options.out is not None and dist.get_rank() == 0:
                command = command_of("torchrun -m bench.parallel", options.out)
                write_record(options.out, device, command, rows=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
