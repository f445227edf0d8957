"""The operations as torch.library ops, in `torch.ops.tmoe`."""

from . import experts, frozen, quantize, route  # noqa: F401  (importing them defines the ops)
from .operation import Operation
from .shortcut import with_shortcut

__all__ = ["Operation", "with_shortcut"]
