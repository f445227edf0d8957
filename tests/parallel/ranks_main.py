"""What a rank's process runs: functions that come through a pipe, until None does."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

import tmoe
import tmoe.parallel  # noqa: F401
from tests.conftest import _poisoning
from tests.parallel.ranks import words_of

_device_constructors()


@torch.no_grad()
def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(-(2**30)) if tensor.dtype in (torch.int32, torch.int64) else tensor


def serve(pipe: Any, rank: int, size: int, store: str, time_out: timedelta, device: str) -> None:
    torch.set_num_threads(1)
    for name in ("empty", "empty_like", "empty_strided"):
        setattr(torch, name, _poisoning(getattr(torch, name), _poison))
    for name in ("new_empty", "new_empty_strided"):
        setattr(torch.Tensor, name, _poisoning(getattr(torch.Tensor, name), _poison))
    if device == "cuda":
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # no NVLink multicast
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=time_out,
    )
    while (asked := pipe.recv()) is not None:
        function, args, keywords = asked
        torch.manual_seed(0)
        try:
            answer = function(rank, *args, **keywords), None
        except Exception as error:  # a failing test is told, not died of
            answer = None, words_of(error)
        pipe.send(answer)
    dist.destroy_process_group()
