"""How much memory some work takes, counted by the storages of the tensors that it makes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tmoe import QuantizedTensor


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made meanwhile, beside those given, took up at one time."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.most = 0
        self.seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            parts = tensor.parts() if isinstance(tensor, QuantizedTensor) else [tensor]
            for part in (p for p in parts if isinstance(p, torch.Tensor)):
                storage = part.untyped_storage()
                if storage not in self.seen:
                    self.seen.add(storage)
                    self.live += storage.nbytes()
                    self.most = max(self.most, self.live)
                    weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes
