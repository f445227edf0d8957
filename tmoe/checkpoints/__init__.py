"""Quantised checkpoints: what is in them, reading experts from them, and making them."""

from .checkpoint import Checkpoint
from .experts import ExpertNames, ExpertWeights, expert_prefixes, find_experts, read_experts
from .header import TensorInfo
from .quantization import LinearFormat, Quantization
from .quantize_checkpoint import quantize_checkpoint
from .write_report import CheckpointReport

__all__ = [
    "Checkpoint",
    "CheckpointReport",
    "ExpertNames",
    "ExpertWeights",
    "LinearFormat",
    "Quantization",
    "TensorInfo",
    "expert_prefixes",
    "find_experts",
    "quantize_checkpoint",
    "read_experts",
]
