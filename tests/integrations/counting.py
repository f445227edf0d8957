"""Count the calls of tmoe's operations, as the dispatcher of torch sees them."""

from __future__ import annotations

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class CountOps(TorchDispatchMode):
    """``with CountOps() as ops: ...`` then ``ops["fused_experts"]``, ``ops.total()``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "tmoe":
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))
