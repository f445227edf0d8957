"""One thing to compile, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.aot.targets import EVERY_GPU
from tmoe.backends.triton_backend import TritonBackend

DEVICE = torch.device("meta")
BACKEND = TritonBackend()


@dataclass(frozen=True)
class Case:
    name: str
    launch: Callable[[], object]
    max_spilled: int = 64  # bytes per thread: a few registers, outside the inner loop
    gpus: Collection[str] = EVERY_GPU  # names of the targets that it is compiled for


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
