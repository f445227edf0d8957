"""What ranks need to send one another bytes:

    torchrun --nproc-per-node 2 -m bench.communication --out FILE

Times all_gather, reduce_scatter, all_reduce, all_to_all and a pair of send and recv over sizes of
1 KB … 256 MB and writes a JSON record, which `python -m bench.fit_communication` fits latency and
bandwidth to.
On GPUs (NCCL) a time is the GPU's own, of a replayed CUDA graph of several calls; `eager_us` is
that of calls launched one by one, where the host's time counts too. On CPUs (gloo) it is wall time.

`bytes` is the size of the whole buffer on each rank: what all_gather gives, what reduce_scatter,
all_reduce and all_to_all are given, what send sends. A rank sends (n - 1) / n of it over its links,
twice that with all_reduce, all of it with send; `gbs` is what it sends over the time, which NCCL's
own benchmarks call bus bandwidth.

Every operation is checked before it is timed. NVLink multicast (NVLS) is switched off: a program
that uses it can take GPUs that others share out of service.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.bench.machine import machine_info

SMALLEST, LARGEST = 2**10, 2**28  # bytes
ROUNDS = 9
GRAPH_US = 3000  # about so long is a round: long against launching it
MOST_CALLS, EAGER_CALLS = 40, 20
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
VARIABLES = ("NCCL_NVLS_ENABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE")

Call = Callable[[], object]

# torch 2.13 renamed them.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Ranks:
    """The process group, and where this rank computes."""

    rank: int
    size: int
    device: torch.device

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"


def operation(name: str, whole: Tensor, part: Tensor, other: Tensor, ranks: Ranks) -> Call:
    """A call that runs the collective. whole, other: n · m numbers, part: m numbers."""
    if name == "all_gather":
        return lambda: all_gather_single(whole, part)
    if name == "reduce_scatter":
        return lambda: reduce_scatter_single(part, whole)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if name == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole)
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size

    def send_recv() -> None:
        sends = dist.P2POp(dist.isend, whole, after), dist.P2POp(dist.irecv, other, before)
        for work in dist.batch_isend_irecv(list(sends)):
            work.wait()

    return send_recv


def check(name: str, ranks: Ranks, dtype: torch.dtype) -> None:
    """Run it once on numbers that tell who sent them where. Raises RuntimeError if it is wrong."""
    n, m, rank = ranks.size, 64, ranks.rank
    row = torch.arange(n * m, device=ranks.device).remainder(16)
    whole, part, other = (torch.full((s,), 99.0, device=ranks.device) for s in (n * m, m, n * m))
    whole, part, other = whole.to(dtype), part.to(dtype), other.to(dtype)
    if name == "all_gather":
        part.fill_(rank)
        wanted, got = torch.arange(n, device=ranks.device).repeat_interleave(m), whole
    elif name == "reduce_scatter":
        whole.copy_(row + rank)
        mine = row[rank * m : (rank + 1) * m]
        wanted, got = n * mine + n * (n - 1) // 2, part
    elif name == "all_reduce":
        whole.copy_(row + rank)
        wanted, got = n * row + n * (n - 1) // 2, whole
    elif name == "all_to_all":
        whole.copy_(row + rank)
        mine = row[rank * m : (rank + 1) * m].repeat(n)
        wanted = mine + torch.arange(n, device=ranks.device).repeat_interleave(m)
        got = other
    else:
        whole.copy_(row + rank)
        wanted, got = row + (rank - 1) % n, other
    operation(name, whole, part, other, ranks)()
    if not torch.equal(got.double(), wanted.double()):
        raise RuntimeError(f"{name} is wrong on rank {rank}: wanted {wanted}, got {got}")


def graph_seconds(call: Call, ranks: Ranks, calls: int) -> list[float]:
    """Seconds of one call, of each round: a CUDA graph of `calls` calls."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    graph.replay()
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()  # the ranks meet here, so that none waits for another inside the round
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e-3 * begin.elapsed_time(end) / calls)
    return found


def eager_seconds(call: Call, ranks: Ranks, calls: int) -> list[float]:
    """Seconds of one call, of each round, launched one by one and waited for at the end."""
    found = []
    for _ in range(ROUNDS):
        _wait(ranks)
        dist.barrier()
        _wait(ranks)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        _wait(ranks)
        found.append((time.perf_counter() - started) / calls)
    return found


def _wait(ranks: Ranks) -> None:
    if ranks.gpu:
        torch.cuda.synchronize()


def measure(name: str, size: int, ranks: Ranks, dtype: torch.dtype) -> dict[str, Any]:
    """One row: the slowest rank's median, and the spread over its rounds."""
    numbers = size // dtype.itemsize
    whole, other = (torch.zeros(numbers, dtype=dtype, device=ranks.device) for _ in range(2))
    part = torch.zeros(numbers // ranks.size, dtype=dtype, device=ranks.device)
    call = operation(name, whole, part, other, ranks)
    for _ in range(3):  # connects the ranks
        call()
    estimate = max(4.0, size / 2e5)  # µs, to choose a number of calls; the same on all ranks
    calls = int(min(MOST_CALLS, max(4, GRAPH_US / estimate))) if ranks.gpu else 3
    eager = eager_seconds(call, ranks, min(calls, EAGER_CALLS))
    rounds = graph_seconds(call, ranks, calls) if ranks.gpu else eager
    mine = statistics.median(rounds), max(rounds) - min(rounds), statistics.median(eager)
    of_ranks: list[Any] = [None] * ranks.size
    dist.all_gather_object(of_ranks, mine)
    seconds, spread, _ = max(of_ranks)
    sent = size * {"send_recv": 1}.get(name, (ranks.size - 1) / ranks.size)
    sent *= 2 if name == "all_reduce" else 1
    return {
        "operation": name, "bytes": size, "dtype": str(dtype).removeprefix("torch."),
        "us": 1e6 * seconds, "spread_us": 1e6 * spread, "gbs": sent / seconds / 1e9,
        "eager_us": 1e6 * max(row[2] for row in of_ranks), "calls": calls,
    }  # fmt: skip


def links() -> str | None:
    """`nvidia-smi topo -m`, which says how the GPUs are linked; None where it can't."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def record(ranks: Ranks, sizes: list[int], stop_at: float, command: str) -> dict[str, Any]:
    """All operations over `sizes`, smallest first, until the time limit."""
    dtype = torch.bfloat16 if ranks.gpu else torch.float32
    hosts: list[Any] = [None] * ranks.size
    dist.all_gather_object(hosts, socket.gethostname())
    found: dict[str, Any] = {
        "machine_info": machine_info(ranks.device), "command": command, "ranks": ranks.size,
        "ranks_per_host": max(hosts.count(host) for host in hosts),
        "backend": dist.get_backend(), "links": links(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if ranks.gpu else None,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "rows": [],
    }  # fmt: skip
    for name in OPERATIONS:
        check(name, ranks, dtype)
    for size in sizes:
        late = [time.monotonic() > stop_at]
        dist.broadcast_object_list(late, src=0)  # or some ranks would wait for the others
        if late[0]:
            found["stopped_before"] = size
            break
        for name in OPERATIONS:
            row = measure(name, size, ranks, dtype)
            found["rows"].append(row)
            if ranks.rank == 0:
                print(
                    "{operation:15} {bytes:>10} bytes  {us:9.2f} µs ± {spread_us:7.2f}  "
                    "{gbs:7.1f} GB/s  eager {eager_us:9.2f} µs".format(**row), flush=True,
                )  # fmt: skip
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.communication", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON record")
    parser.add_argument("--smallest", type=int, default=SMALLEST, help="bytes")
    parser.add_argument("--largest", type=int, default=LARGEST, help="bytes")
    parser.add_argument("--step", type=int, default=2, help="factor from one size to the next")
    parser.add_argument("--seconds", type=float, default=70, help="start no size after these")
    parser.add_argument("--commit", help="of the sources, where there is no git")
    options = parser.parse_args(arguments)
    stop_at = time.monotonic() + options.seconds
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device(device))
    sizes = [options.smallest]
    while sizes[-1] * options.step <= options.largest:
        sizes.append(sizes[-1] * options.step)
    given = ["FILE" if text == str(options.out) else text for text in arguments or sys.argv[1:]]
    command = " ".join([f"torchrun --nproc-per-node {ranks.size} -m bench.communication", *given])
    found = record(ranks, sizes, stop_at, command)
    found["machine_info"]["commit"] = options.commit or found["machine_info"]["commit"]
    if ranks.rank == 0:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
