"""Quantised checkpoints: what is in them, and reading experts without dequantising them."""

from .checkpoint import Checkpoint
from .experts import ExpertNames, ExpertWeights, expert_prefixes, find_experts, read_experts
from .header import TensorInfo
from .quantization import LinearFormat, Quantization

__all__ = [
    "Checkpoint",
    "ExpertNames",
    "ExpertWeights",
    "LinearFormat",
    "Quantization",
    "TensorInfo",
    "expert_prefixes",
    "find_experts",
    "read_experts",
]
