"""What the ranks of `test_communication_model.py` do."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from bench import communication


def measure_two(rank: int) -> dict[str, Any]:
    """A small record, and what is said if an operation gives something else."""
    ranks = communication.Ranks(rank, dist.get_world_size(), torch.device("cpu"))
    found = communication.record(ranks, [1024, 4096], time.monotonic() + 60, "a command")
    gather = communication.all_gather_single
    communication.all_gather_single = lambda out, part: out.fill_(7)
    try:
        communication.check("all_gather", ranks, torch.float32)
    except RuntimeError as error:
        found["wrong"] = str(error)
    finally:
        communication.all_gather_single = gather
    return found
