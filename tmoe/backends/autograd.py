"""Autograd inside an op: where one backend's backward is its forward, differentiated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def autograd_on() -> Iterator[None]:
    """Record, below a mode of torch's dispatcher too (FLOP counters, memory trackers): what such a
    mode calls again runs without autograd."""
    guard, key = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey
    functionality, views = key.AutogradFunctionality, key.ADInplaceOrView
    with torch.enable_grad(), guard(functionality, False), guard(views, False):
        yield
