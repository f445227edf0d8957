"""The floor: the least time that a GPU needs for an operation, whoever writes the kernel.

    floor = max(flops / peak, bytes / bandwidth)

Bytes are those that must move once: the weights of the experts that got a token, the input, the
output. Peak and bandwidth are measured, not read from a data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ..demo.timing import median_ms
from ..shapes import MoEShape


@dataclass(frozen=True, slots=True)
class Roof:
    """What a device reaches at best."""

    tflops: float  # dense matmul
    gbs: float  # memory, GB/s
    source: str


# An 8192³ matmul and a streaming read, both as the median of CUDA-graph replays.
ROOFS = {
    ("NVIDIA H200", torch.bfloat16): Roof(746, 4350, "recorded: measured on one H200"),
    ("NVIDIA H200", torch.float8_e4m3fn): Roof(1405, 4350, "recorded: measured on one H200"),
}


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation has to do."""

    flops: float
    bytes: float

    def floor_us(self, roof: Roof) -> float:
        return max(self.flops / (1e6 * roof.tflops), self.bytes / (1e3 * roof.gbs))


def experts_work(
    shape: MoEShape,
    num_tokens: int,
    num_touched: float,
    itemsize: int,
    weight_bytes: float | None = None,
) -> Work:
    """A SwiGLU layer with `num_touched` of its experts in use: both projections, x and y. Weights
    have the itemsize of x, or their own number of bytes, of all experts."""
    per_expert = 3 * shape.hidden * shape.intermediate  # gate, up and down
    if weight_bytes is None:
        weight_bytes = itemsize * shape.num_experts * per_expert
    moved = num_touched / shape.num_experts * weight_bytes
    moved += 2 * itemsize * num_tokens * shape.hidden
    return Work(2 * num_tokens * shape.top_k * per_expert, moved)


@cache
def roof_of(device: torch.device, dtype: torch.dtype) -> Roof:
    """The recorded roof of this GPU; where there is none, one measured now, in a second. Without a
    record fp8 counts as twice as fast as bf16, which it is on every GPU that has it."""
    recorded = ROOFS.get((device_name(device), dtype))
    if recorded is not None:
        return recorded
    if dtype.itemsize == 1:
        wide = roof_of(device, torch.bfloat16)
        return Roof(2 * wide.tflops, wide.gbs, f"{wide.source}, twice bf16")
    return Roof(matmul_tflops(device, dtype), copy_gbs(device), "measured at the start")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """A square matmul of torch: 8192³ on a GPU. It tells how hot the GPU is, too."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    ms = median_ms([lambda: torch.mm(a, b.T, out=out)] * 4, device, repeats=5)
    return 2 * n**3 / (1e9 * ms)


def copy_gbs(device: torch.device) -> float:
    """A copy that no cache holds, counted as read and write."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = median_ms([lambda: target.copy_(source)] * 2, device, repeats=5)
    return 2 * size / (1e6 * ms)
