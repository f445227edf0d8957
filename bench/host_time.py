"""What a call costs the host: `python -m bench.host_time [--tokens T] [--out FILE]`.

Qwen3-30B-A3B's router and experts with few tokens, where the GPU is done sooner than Python, as a
loop of calls that nobody waits for. By the three ways that there are: through Triton's launcher,
with the launches replayed behind the operation (as torch.compile calls it), and replayed at once.
Needs a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

import tmoe
from bench.script import command_of, write_record
from tmoe.backends.triton_backend import TritonBackend
from tmoe.dispatch.backend import Replayed
from tmoe.library import shortcut
from tmoe.ops import router

E, K, H, I = 128, 8, 2048, 768
CALLS, ROUNDS = 50, 20
WAYS = ("launched by Triton", "replayed behind the operation", "replayed at once")


@contextmanager
def by(way: str) -> Iterator[None]:
    """Make calls go that way."""
    with ExitStack() as stack:
        if way != "replayed at once":
            stack.enter_context(patch.object(shortcut, "DEVICES", ()))
        if way == "launched by Triton":
            stack.enter_context(patch.object(TritonBackend, "repeat", _launch))
        yield


def _launch(self: TritonBackend, compute: Callable[..., Any], arguments: Any) -> Replayed:
    return Replayed(compute(self, *arguments), None, [])


def host_us(call: Callable[[], object]) -> float:
    """Of a call, without waiting for the GPU."""
    found = []
    for _ in range(ROUNDS + 2):  # two to warm up
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append(1e6 * (time.perf_counter() - started) / CALLS)
    return median(found[2:])


@torch.no_grad()
def measure(tokens: int) -> list[dict[str, object]]:
    """A row for each call and way."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    x = torch.randn(tokens, H, device=device).to(dtype)
    gate = torch.randn(E, H, device=device).to(dtype) / 45
    gate_up = torch.randn(E, 2 * I, H, device=device).to(dtype) / 45
    down = torch.randn(E, H, I, device=device).to(dtype) / 28
    routing = tmoe.Routing(E, K, "Renormalize")
    _, weights, ids = router(x, gate, routing)
    rows = [{"call": "x + x", "way": "torch", "us": host_us(lambda: x + x)}]
    for name, call in (
        ("router", lambda: router(x, gate, routing)),
        ("experts", lambda: tmoe.fused_experts(x, gate_up, down, weights, ids)),
    ):
        for way in WAYS:
            with by(way):
                rows.append({"call": name, "way": way, "us": host_us(call)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host_time", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write JSON here too")
    options = parser.parse_args()
    rows = measure(options.tokens)
    table = Table("call", "way", "µs per call")
    for row in rows:
        table.add_row(row["call"], row["way"], f"{row['us']:.1f}")
    Console().print(table)
    if options.out is not None:
        command = command_of("python -m bench.host_time", options.out)
        write_record(options.out, torch.device("cuda"), command, tokens=options.tokens, rows=rows)


if __name__ == "__main__":
    main()
