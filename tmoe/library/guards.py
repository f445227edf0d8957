"""What is in force while an op computes: the device, no autocast, and autograd where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def is_current(device: torch.device) -> bool:
    """Whether kernels, which are launched on the current device, run where the tensors are."""
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Makes the tensors' device the current one."""
    return nullcontext() if is_current(device) else torch.cuda.device(device)


def autocast_off(device: torch.device) -> AbstractContextManager[Any]:
    """The caller has cast what autocast casts; inside an op, float32 means float32."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@contextmanager
def autograd_works() -> Iterator[None]:
    """Autograd can work inside an op, even where a mode, such as `FlopCounterMode`, called it: what
    a mode calls stands below autograd."""
    key = torch._C.DispatchKey
    keys = torch._C.DispatchKeySet(key.AutogradFunctionality).add(key.ADInplaceOrView)
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - keys
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield
