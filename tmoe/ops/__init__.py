"""The public functions: check what came, call the op, return."""

from .experts import fused_experts
from .grouped_gemm import grouped_gemm
from .moe import moe
from .quantize import dequantize, quantize
from .route import route, router

__all__ = [
    "dequantize",
    "fused_experts",
    "grouped_gemm",
    "moe",
    "quantize",
    "route",
    "router",
]
