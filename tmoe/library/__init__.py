"""The operations as torch.library ops, in `torch.ops.tmoe`."""

from . import (  # noqa: F401  (importing them defines the ops)
    experts,
    frozen,
    grouped_gemm,
    quantize,
    quantized_experts,
    route,
)
from .define import operator
from .shortcut import with_shortcut

__all__ = ["operator", "with_shortcut"]
