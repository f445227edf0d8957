"""Routers as Triton kernels: logits by one for few tokens and by a library for more, then routing.

For few tokens the product is left in parts, which the routing kernel sums up as it reads them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.kernels.route import route
from tmoe.kernels.route_backward import route_backward
from tmoe.kernels.router_linear import router_linear

from ..dispatch.problem import Routed, RouteInputs
from ..options import current
from ..routing import Routing

FEW_TOKENS = 64  # up to here `router_linear` beats a matmul library; see bench/bench_router.py


def run_router(
    x: Tensor, weight: Tensor, linear_bias: Tensor | None, routing: Routing, inputs: RouteInputs
) -> tuple[Tensor, Routed]:
    """See `tmoe.dispatch.backend.Backend.router`."""
    T, E = x.shape[0], weight.shape[0]
    narrow = x.dtype in (torch.bfloat16, weight.dtype) and x.dtype != torch.float32
    few = T <= FEW_TOKENS and narrow and routing.rule.num_shared == 0
    if few or current().batch_invariant:
        parts = router_linear(_with_whole_rows(x), _with_whole_rows(weight), linear_bias)
        if routing.rule.num_shared == 0:
            logits = weight.new_empty(T, E)
            return logits, run_route(parts, routing, inputs, logits)
        logits = parts.sum(0).to(weight.dtype)
    else:
        logits = F.linear(x.to(weight.dtype), weight, linear_bias)
    return logits, run_route(logits, routing, inputs)


def run_route(
    logits: Tensor, routing: Routing, inputs: RouteInputs, sums: Tensor | None = None
) -> Routed:
    """See `tmoe.dispatch.backend.Backend.route`. `sums` receives the sum of logits in parts."""
    bias, expert_scale, topk_ids, want_probs, want_counts, weights_dtype, ids_dtype = inputs
    T, E = logits.shape[-2], routing.num_experts
    probs = logits.new_empty(T, E, dtype=torch.float32) if want_probs else None
    counts = logits.new_zeros(E, dtype=torch.int32) if want_counts else None
    weights, ids = route(
        logits,
        bias=bias,
        expert_scale=expert_scale,
        topk_ids=topk_ids,
        probs=probs,
        expert_counts=counts,
        sums=sums,
        weights_dtype=weights_dtype,
        ids_dtype=ids_dtype,
        **routing.kernel_arguments,
    )
    return Routed(weights, ids, probs, counts)


def run_route_backward(
    d_weights: Tensor,
    d_probs: Tensor | None,
    logits: Tensor,
    routing: Routing,
    expert_scale: Tensor | None,
    topk_ids: Tensor,
) -> Tensor:
    """See `tmoe.dispatch.backend.Backend`."""
    recipe = routing.kernel_arguments
    return route_backward(d_weights, d_probs, logits, topk_ids, expert_scale=expert_scale, **recipe)


def _with_whole_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
