"""How long a call takes on several ranks: what the benches of exchanges and placement time with.

Ranks begin together, and the slowest one's time counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from bench.communication import all_gather_single, reduce_scatter_single

ROUNDS = 7
Call = Callable[[], object]


def graph_us(calls: list[Call], device: torch.device) -> float:
    """Of a call, the median of several replays; the slowest rank's. On a CPU, of wall time."""
    if device.type == "cpu":
        return slowest([eager_us(call, device) for call in calls], device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog looks at events of its own meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    found = []
    for _ in range(ROUNDS):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # ranks begin together, whatever the barrier left
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        found.append(1e3 * start.elapsed_time(end) / len(calls))
    return slowest(found, device)


def eager_us(call: Call, device: torch.device) -> float:
    """As Python calls it, the host's time included."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    found = []
    for _ in range(12):
        settle()
        dist.barrier()
        settle()
        started = time.perf_counter()
        call()
        settle()
        found.append(1e6 * (time.perf_counter() - started))
    return median(found[3:])


def slowest(found: list[float], device: torch.device) -> float:
    time = torch.tensor(median(found), device=device)
    dist.all_reduce(time, op=dist.ReduceOp.MAX)
    return time.item()


def nccl_us(tokens: int, size: int, hidden: int, device: torch.device) -> dict[str, float]:
    """What NCCL takes for messages of `size` bytes a token and for sums in float32, and nothing
    else: to gather and to reduce-scatter, and twice all-to-all with all tokens for each rank. There
    also without the rows that stay, which tmoe doesn't send."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    x = torch.zeros(tokens, size, dtype=torch.uint8, device=device)
    everything = x.new_empty(ranks * tokens, size)
    sums = torch.zeros(ranks * tokens, hidden, device=device)
    mine, back = sums.new_empty(tokens, hidden), torch.empty_like(sums)
    away = [0 if r == dist.get_rank() else tokens for r in range(ranks)]
    messages, n = torch.zeros_like(everything), tokens * (ranks - 1)

    def gather() -> None:
        all_gather_single(everything, x, group=group)
        reduce_scatter_single(mine, sums, group=group)

    def to_all() -> None:
        dist.all_to_all_single(everything, messages, group=group)
        dist.all_to_all_single(back, sums, group=group)

    def to_others() -> None:
        dist.all_to_all_single(everything[:n], messages[:n], away, away, group=group)
        dist.all_to_all_single(back[:n], sums[:n], away, away, group=group)

    times = {"nccl_us": gather, "nccl_to_all_us": to_all, "nccl_to_others_us": to_others}
    return {name: graph_us([call] * 4, device) for name, call in times.items()}
