"""The operations as torch.library ops, in `torch.ops.tmoe`."""

from . import experts, frozen, quantize, route  # noqa: F401  (importing them defines the ops)
from .define import operator
from .shortcut import with_shortcut

__all__ = ["operator", "with_shortcut"]
