"""Routers and routing, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from tests.aot.case import BACKEND, Case, empty, short
from tmoe.dispatch.problem import RouteInputs
from tmoe.routing import Routing, RoutingRule
from tmoe.routing.rule import TINY

# Its smallest sum is subnormal in fp32, so that Triton passes it as fp64.
MINIMAX_M2 = RoutingRule(score="sigmoid", takes_bias=True, renormalize=True, min_sum=TINY)


def route(routing: Routing, dtype: torch.dtype, num_tokens: int = 64, **wants: Any) -> Case:
    rule, E = routing.rule, routing.num_experts
    logits = empty(num_tokens, routing.num_logits, dtype=dtype)
    inputs = RouteInputs(
        bias=empty(E, dtype=torch.float32) if rule.takes_bias else None,
        expert_scale=empty(E, dtype=dtype) if rule.takes_expert_scale else None,
        **wants,
    )
    return Case(
        f"route {routing.name} E={E} {short(dtype)}",
        lambda: BACKEND.route(logits, routing, inputs),
    )


def route_backward(routing: Routing, dtype: torch.dtype) -> Case:
    T, E, K = 4096, routing.num_logits, routing.num_weighed
    logits, scale = empty(T, E, dtype=dtype), empty(routing.num_experts, dtype=dtype)
    ids, fp32 = empty(T, routing.top_k, dtype=torch.int32), torch.float32
    gradients = (empty(T, K, dtype=fp32), empty(T, routing.num_experts, dtype=fp32))
    scale = scale if routing.rule.takes_expert_scale else None
    return Case(
        f"route backward {routing.name} E={E} {short(dtype)}",
        lambda: BACKEND.route_backward(*gradients, logits, routing, scale, ids),
    )


def router(E: int, H: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> Case:
    x, weight = empty(16, H, dtype=dtype), empty(E, H, dtype=weight_dtype)
    routing = Routing(E, 2, "Renormalize")
    return Case(
        f"router E={E} {short(dtype)} x {short(weight_dtype)}",
        lambda: BACKEND.router(x, weight, None, routing, RouteInputs()),
    )
