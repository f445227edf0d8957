"""A whole layer, from logits to output: `moe`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..arguments import FLOATS, expect_dtype, expect_same_device
from ..checks import expect, expect_size, expect_type
from ..routing import Routing
from .experts import fused_experts
from .route import route


def moe(
    x: Tensor,
    logits: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    num_experts: int | None = None,
    weight_on_input: bool = False,
    **experts: Any,
) -> Tensor:
    """`route`, then `fused_experts`: from the router's logits (..., E) to the layer's output.

    `bias` and `expert_scale` are `route`'s; every other keyword is `fused_experts`', and so is what
    is returned and raised. The routing has the global number of experts and says, with
    `weight_on_input` (which Llama4 implies), where the routing weight is applied. Shared experts
    that the router weighs are the last of the weights.
    """
    expect_type(routing, Routing, "moe", "routing")
    expect_type(weight_on_input, bool, "moe", "weight_on_input")
    E = routing.num_logits
    if num_experts is not None:
        expect_size(num_experts, "moe", "num_experts")
        expect(num_experts == E, "moe", "num_experts", f"{E}, as in routing", num_experts)
    expect_dtype(x, "moe", "x", FLOATS)
    expect_dtype(logits, "moe", "logits", FLOATS)
    expect_same_device("moe", {"x": x}, logits=logits)
    if logits.shape[:-1] != x.shape[:-1] and logits.ndim != 2:
        wanted = f"of x's leading sizes {tuple(x.shape[:-1])}, or (T, {E})"
        expect(False, "moe", "logits", wanted, tuple(logits.shape))
    topk_weights, topk_ids = route(logits, routing, bias=bias, expert_scale=expert_scale)
    return fused_experts(
        x,
        gate_up_proj,
        down_proj,
        topk_weights,
        topk_ids,
        num_experts=E,
        weight_on_input=weight_on_input or routing.weight_on_input,
        **experts,
    )
