"""Forward and backward of the routed experts: `python -m bench.training [--out FILE]`.

tmoe, tmoe with `options(recompute=True)` and other people's layers, at the shapes of real models:
all gradients (x, routing weights, both weights), each checked against fp64 before it is timed as a
CUDA graph, or call by call where a layer waits for the GPU. With it the peak of memory, as
`tmoe.bench.activation_memory` counts it. Needs a GPU.

    python -m bench.training --ways "tmoe/grouped_mm/liger/scattermoe/sonicmoe" --tokens 4096,16384

A peer that isn't installed is said. `--eager` times every way call by call, for a comparison with
those that wait.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import tmoe
from bench.script import command_of
from tmoe.bench.activation_memory import peak_memory
from tmoe.bench.gradients import check_gradients
from tmoe.bench.machine import machine_info
from tmoe.bench.peers import TRAINING_PEERS, Missing
from tmoe.bench.roofline import matmul_tflops
from tmoe.bench.shapes import SHAPES, routed_inputs
from tmoe.bench.timing import seconds_per_call, seconds_per_queued_call
from tmoe.shapes import MoEShape, random_weights

MODELS = ("qwen3-30b-a3b", "deepseek-v3-ep8", "mixtral-8x7b")
TOKENS = (4096, 8192, 16384, 32768)
WAYS = ("tmoe", "tmoe, recompute", "grouped_mm")
NAMES = ("x", "topk_weights", "gate_up_proj", "down_proj")
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
# Others round where we don't: Liger adds up the routing weights' gradients in bf16. A convention
# that is another one than thought is wrong by far more.
PEER_FACTOR = 8.0

Forward = Callable[[], Tensor]


def forward_of(way: str, tensors: dict[str, Tensor], topk_ids: Tensor) -> Forward:
    """Raises `Missing` for a peer that can't run here."""
    if way.startswith("tmoe"):

        def ours() -> Tensor:
            with tmoe.options(recompute=way.endswith("recompute")):
                return tmoe.fused_experts(**tensors, topk_ids=topk_ids)

        return ours
    layer = TRAINING_PEERS[way].layer(tensors["gate_up_proj"], tensors["down_proj"])
    return lambda: layer(tensors["x"], tensors["topk_weights"], topk_ids)


def measure(
    shape: MoEShape, counts: list[int], ways: list[str], eager: bool = False
) -> Iterator[dict[str, Any]]:
    """A row for each number of tokens and each way."""
    torch.manual_seed(0)
    weights = dict(zip(NAMES[2:], random_weights(shape, DEVICE, DTYPE), strict=True))
    for T in counts:
        x, topk_weights, topk_ids = routed_inputs(shape, T, DEVICE, DTYPE)
        tensors = {"x": x, "topk_weights": topk_weights, **weights}
        tensors = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        dy = torch.randn(x.shape, device=DEVICE).to(DTYPE)
        for way in ways:
            peer = TRAINING_PEERS.get(way)
            queued = eager or (peer is not None and peer.waits)
            row = {"shape": shape.name, "tokens": T, "way": way}
            row |= {"timed": "call by call" if queued else "graph"}
            how = {"is_ours": peer is None, "queued": queued}
            try:
                forward = forward_of(way, tensors, topk_ids)
                yield row | measure_one(forward, tensors, topk_ids, dy, **how)
            except (Missing, AssertionError, RuntimeError) as error:
                yield row | {"failed": f"{type(error).__name__}: {error}"[:300]}
            torch.cuda.empty_cache()


def measure_one(
    forward: Forward, tensors: dict[str, Tensor], topk_ids: Tensor, dy: Tensor,
    *, is_ours: bool = True, queued: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Times in microseconds, memory in bytes."""
    leaves = [tensors[name] for name in NAMES]

    def backward(y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, leaves, dy)

    got = dict(zip(NAMES, backward(forward()), strict=True))
    plain = {name: tensor.detach() for name, tensor in tensors.items()}
    if is_ours:
        check_gradients(got, plain, topk_ids, dy)
    else:
        got = {name: gradient.to(dy.dtype) for name, gradient in got.items()}
        check_gradients(got, plain, topk_ids, dy, factor=PEER_FACTOR)
    del got
    peaks = peak_memory(forward, backward, [name in NAMES[2:] for name in NAMES])

    def step() -> object:
        return backward(forward())

    seconds = seconds_per_queued_call(step, DEVICE) if queued else seconds_per_call([step], DEVICE)
    us = 1e6 * median(seconds)
    (T, K), (_, H, I) = topk_ids.shape, tensors["down_proj"].shape
    return {
        "us": us,
        "tflops": 18 * T * K * H * I / us / 1e6,
        "peak_bytes": peaks.whole,
        "activation_bytes": peaks.activations,
        "kept_bytes": peaks.kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--ways", default="/".join(WAYS), help="with / between them")
    parser.add_argument("--eager", action="store_true", help="time every way call by call")
    parser.add_argument("--commit", help="written down where the machine has no git")
    parser.add_argument("--out", type=Path, help="write JSON here too, after every row")
    options = parser.parse_args()
    command = command_of("python -m bench.training", options.out)
    machine = machine_info(DEVICE)
    machine["commit"] = options.commit or machine["commit"]
    machine["matmul_tflops_at_start"] = matmul_tflops(DEVICE, DTYPE)
    found: dict[str, Any] = {"machine_info": machine, "command": command, "rows": []}
    for name in options.shapes.split(","):
        counts = [int(text) for text in options.tokens.split(",")]
        for row in measure(SHAPES[name], counts, options.ways.split("/"), options.eager):
            found["rows"].append(row)
            print(_line(row), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _line(row: dict[str, Any]) -> str:
    start = "{shape:16} T={tokens:<6} {way:16}".format(**row)
    if "failed" in row:
        return f"{start} {row['failed']}"
    mib = {f"{key}_mib": row[f"{key}_bytes"] / 2**20 for key in ("peak", "activation", "kept")}
    text = "{us:9.0f} µs {tflops:4.0f} TFLOP/s  MiB: peak {peak_mib:6.0f}"
    text += " without weight gradients {activation_mib:6.0f} kept {kept_mib:6.0f}, timed {timed}"
    return f"{start} {text}".format(**row, **mib)


if __name__ == "__main__":
    main()
