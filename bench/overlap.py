"""A shared expert beside the routed ones: what `bench.parallel` measures with it on a stream of its
own, and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tmoe
from tmoe.parallel import fixed_tokens
from tmoe.parallel.modules import ParallelMoE

SHARED = {"deepseek-v3": 2048}  # width of the model's shared expert


def with_shared(shape: Any, experts: Any, width: int, device: torch.device) -> tmoe.MoE:
    """A whole layer around experts that are divided."""
    routing = tmoe.Routing(shape.num_experts, shape.top_k, "Renormalize")
    with torch.device("meta"):
        layer = tmoe.MoE(
            shape.hidden, shape.intermediate, routing, shared_intermediate_size=width,
            dtype=torch.bfloat16,
        )  # fmt: skip
    layer.experts = experts
    for part in (layer.gate, layer.shared_expert):
        assert part is not None
        part.to_empty(device=device)
        part.reset_parameters()
    layer.__class__ = ParallelMoE
    return layer.requires_grad_(False)


def with_and_without(
    layer: tmoe.MoE, inputs: list[tuple[Tensor, Tensor]], time: Callable[[list[Any]], float]
) -> dict[str, float]:
    """x and ids of each call -> µs of a call with the shared expert on a stream of its own, without
    that, and of the layer without its shared expert. The bits are compared."""
    found, results = {}, []
    parallel, shared = layer.experts.parallel, layer.shared_expert
    with fixed_tokens():
        for name, own_stream in (("beside_us", True), ("in_turn_us", False)):
            parallel.overlap = own_stream
            results.append(layer(*inputs[0]).clone())
            found[name] = time([lambda i=i: layer(*i) for i in inputs])
        parallel.overlap = True
        layer.shared_expert = None
        found["routed_us"] = time([lambda i=i: layer(*i) for i in inputs])
        layer.shared_expert = shared
    if not torch.equal(*results):
        raise RuntimeError("a shared expert on a stream of its own gives other bits")
    return found
