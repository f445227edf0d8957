"""The layers that the benchmarks run, and how each model routes."""

from __future__ import annotations

import tmoe
from tmoe.demo.shapes import MODEL_SHAPES, MoEShape

GPU_SHAPES = (
    *MODEL_SHAPES,
    MoEShape("deepseek-v3-tp8", 256, 8, 7168, 256),  # every expert cut into 8 slices
    MoEShape("olmoe", 64, 8, 2048, 1024),
)
TINY = MoEShape("tiny", 8, 2, 256, 256)  # a layer of the demo's model
SHAPES = {shape.name: shape for shape in (*GPU_SHAPES, TINY)}

GPU_TOKENS = (1, 16, 128, 1024, 8192)
CPU_TOKENS = (1, 16, 128)

# The model's method; Renormalize (softmax over the chosen) where none is named.
_DEEPSEEK = {"method": "DeepSeekV3", "n_group": 8, "topk_group": 4, "scaling_factor": 2.5}
_ROUTING = {
    "qwen3-30b-a3b": {"method": "RenormalizeNaive"},
    "deepseek-v3-ep8": _DEEPSEEK,
    "deepseek-v3-tp8": _DEEPSEEK,
    "llama4-scout": {"method": "Llama4"},
    "olmoe": {"method": "Default"},
}


def routing_of(shape: MoEShape) -> tmoe.Routing:
    """The routing of the shape's model, over the experts that the shape has."""
    arguments = _ROUTING.get(shape.name, {"method": "Renormalize"})
    return tmoe.Routing(shape.num_experts, shape.top_k, **arguments)
