"""Beside: a shared expert that runs while tokens are on their way and experts compute.

On a GPU it gets a stream of its own, which begins after what made its input and ends before its
result is used; CUDA graphs capture both. Its kernels and their order are the same ones, so are its
bits. Elsewhere, where gradients are needed, and where its width is divided, it runs between sending
and receiving: NCCL has a stream of its own anyway, gradients are added up on the stream of the
forward, and what it sends itself keeps its place among the layer's collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


class Beside:
    """One call: made before tokens are sent, `start` after that, `result` in the end."""

    def __init__(self, work: Callable[[], Tensor] | None, x: Tensor, *, own_stream: bool) -> None:
        """`own_stream`: whether it may have one."""
        self.work, self.device = work, x.device
        self.own_stream = own_stream and x.is_cuda
        self.begin: Any = None
        if work is not None and self.own_stream:
            self.begin = torch.cuda.current_stream(self.device).record_event()

    def start(self) -> None:
        if self.work is None:
            self.found = None
        elif self.begin is None:
            self.found = self.work()
        else:
            stream = _stream(self.device)
            stream.wait_event(self.begin)
            with torch.cuda.stream(stream):
                self.found = self.work()

    def result(self) -> Tensor | None:
        if self.begin is not None and self.found is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(_stream(self.device))
            self.found.record_stream(now)
        return self.found


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
