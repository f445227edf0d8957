"""The public functions: check what came, call the op, return."""

from .experts import fused_experts, grouped_gemm, moe
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
