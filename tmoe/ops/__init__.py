"""The public functions: check what came, call the op, return."""

from .experts import fused_experts, grouped_gemm, moe
from .route import route, router

__all__ = ["fused_experts", "grouped_gemm", "moe", "route", "router"]
