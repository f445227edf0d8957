"""The benches of exchanges and placement at a tiny size; each function runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bench import overlap, parallel, placement, rank_times
from tests.parallel.cases import Case, mesh_of
from tests.parallel.shared_memory import shared_memory
from tmoe.shapes import MoEShape

TINY = MoEShape("tiny", 8, 2, 128, 128)


def _short() -> None:
    """Everything is computed, little is timed."""
    parallel.CALLS = placement.CALLS = 1
    parallel.eager_us = rank_times.eager_us = lambda call, device: (call(), 1.0)[1]
    times = ("nccl_us", "nccl_to_all_us", "nccl_to_others_us")
    parallel.nccl_us = lambda *sizes: dict.fromkeys(times, 1.0)


@torch.no_grad()
def exchanges(rank: int, shared: bool) -> list[dict[str, Any]]:
    _short()
    overlap.SHARED["tiny"] = 16
    mesh = mesh_of(Case("", (dist.get_world_size(),), ("x",), ()))
    device = torch.device("cpu")
    if not shared:
        return parallel.measure(TINY, "fp8_block", [3], mesh, device)
    with shared_memory():
        return parallel.measure(TINY, "bf16", [1], mesh, device)


@torch.no_grad()
def placed(rank: int) -> list[dict[str, Any]]:
    _short()
    mesh = mesh_of(Case("", (dist.get_world_size(),), ("x",), ()))
    return placement.measure(TINY, "bf16", [4], [0, 2], ["all_to_all"], mesh, torch.device("cpu"))
