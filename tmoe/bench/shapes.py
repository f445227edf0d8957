"""The layers that the benchmarks run, how each model routes, and how tokens may spread."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tmoe

from ..checks import expect
from ..dispatch.known import MODELS
from ..shapes import MODEL_SHAPES, MoEShape, layer_shape

TINY = MoEShape("tiny", 8, 2, 256, 256)  # a layer of the demo's model
TP8 = layer_shape("deepseek-v3", tp=8)

# What runs by default on a GPU, and what the records have.
GPU_SHAPES = (*MODEL_SHAPES, TP8, layer_shape("olmoe"))
SHAPES = {shape.name: shape for shape in GPU_SHAPES}
SHAPES |= {name: layer_shape(name) for name in MODELS if name not in SHAPES}
SHAPES["tiny"] = TINY

ALL_TOKENS = tuple(2**power for power in range(15))  # 1 … 16384
GPU_TOKENS = (1, 16, 128, 1024, 8192)
CPU_TOKENS = (1, 16, 128)

# How tokens choose, in the words of `tmoe.simulate_routing`.
ZIPF = 1.2
ROUTINGS: dict[str, dict[str, Any]] = {
    "random": {"distribution": "uniform"},
    "balanced": {"distribution": "balanced"},
    "zipf": {"distribution": "skewed", "skew": ZIPF},
    "one_expert": {"distribution": "one_expert"},
}

# The model's method; Renormalize (softmax over the chosen) where none is named.
_DEEPSEEK: dict[str, Any] = {
    "method": "DeepSeekV3",
    "n_group": 8,
    "topk_group": 4,
    "scaling_factor": 2.5,
}
_ROUTING: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"method": "RenormalizeNaive"},
    "qwen3-235b-a22b": {"method": "RenormalizeNaive"},
    "glm-4.5": {"method": "DeepSeekV3", "scaling_factor": 2.5},
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v3-ep8": _DEEPSEEK,
    "deepseek-v3-tp8": _DEEPSEEK,
    "kimi-k2": {"method": "DeepSeekV3", "scaling_factor": 2.827},
    "llama4-scout": {"method": "Llama4"},
    "llama4-maverick": {"method": "Llama4"},
    "olmoe": {"method": "Default"},
}


def routing_of(shape: MoEShape) -> tmoe.Routing:
    """The routing of the shape's model, over the experts that the shape has."""
    arguments = _ROUTING.get(shape.name, {"method": "Renormalize"})
    return tmoe.Routing(shape.num_experts, shape.top_k, **arguments)


def routed_inputs(
    shape: MoEShape,
    num_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    routing: str = "random",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, H) in `dtype`, topk_weights (T, K) in fp32, topk_ids (T, K) in int32, as routers give
    them. `routing` is one of `ROUTINGS`; each `seed` has tokens and routes of its own."""
    expect(
        routing in ROUTINGS,
        "routed_inputs",
        "routing",
        f"one of {', '.join(ROUTINGS)}",
        repr(routing),
    )
    weights, ids = tmoe.simulate_routing(
        num_tokens, shape.num_experts, shape.top_k, **ROUTINGS[routing], seed=seed, device=device
    )
    random = torch.Generator(device).manual_seed(seed)
    x = torch.randn(num_tokens, shape.hidden, device=device, generator=random).to(dtype)
    return x, weights, ids
