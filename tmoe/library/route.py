"""torch.ops.tmoe.route and torch.ops.tmoe.router."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import Backend
from ..dispatch.problem import RouteInputs, token_bucket
from ..routing import Routing
from .operation import Facts, Operation

# route --------------------------------------------------------------------------------------------


def _route_facts(
    logits: Tensor, bias: Tensor | None, scale: Tensor | None, ids: Tensor | None, routing: str,
    *wants: bool,
) -> Facts:  # fmt: skip
    recipe, T, has_bias = Routing.from_json(routing), logits.shape[0], bias is not None
    inputs = RouteInputs(bias, scale, ids, *wants)
    extras = (name for name in RouteInputs._fields[1:] if _is_used(getattr(inputs, name)))
    return Facts(
        "route",
        token_bucket(T),
        0,
        0,
        recipe.num_experts,
        recipe.top_k,
        logits.dtype,
        routing=routing,
        extras=tuple(extras),
        has_bias=has_bias,
    )


def _is_used(value: Tensor | bool | None) -> bool:
    return isinstance(value, Tensor) or value is True


def _route(backend: Backend, logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    bias, expert_scale, topk_ids, routing, want_probs, want_counts, _ = rest  # route has no `out`
    inputs = RouteInputs(bias, expert_scale, topk_ids, want_probs, want_counts)
    weights, ids, probs, counts = backend.route(logits, Routing.from_json(routing), inputs)
    probs = weights.new_empty(0) if probs is None else probs
    counts = ids.new_empty(0) if counts is None else counts
    return weights, ids, probs, counts


def _fake_route(
    logits: Tensor, bias: Tensor | None, scale: Tensor | None, ids: Tensor | None, routing: str,
    want_probs: bool, want_counts: bool, needs_grad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    recipe, T = Routing.from_json(routing), logits.shape[0]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.new_empty((T, recipe.num_weighed), dtype=dtype)
    probs = weights.new_empty((T, recipe.num_experts) if want_probs else 0)
    topk_ids = torch.empty_like(weights, dtype=torch.int32)
    return weights, topk_ids, probs, topk_ids.new_empty(recipe.num_experts if want_counts else 0)


Operation(
    "route",
    "Tensor logits, Tensor? bias, Tensor? expert_scale, Tensor? topk_ids, str routing, "
    "bool want_probs, bool want_counts",
    "(Tensor, Tensor, Tensor, Tensor)",
    facts=_route_facts,
    compute=_route,
    fake=_fake_route,
    differentiable=(0, 2),
    differentiated=(0, 2),
).define(has_out=False)


# router -------------------------------------------------------------------------------------------


def _router_facts(x: Tensor, weight: Tensor, linear_bias: Tensor | None, *rest: Any) -> Facts:
    facts = _route_facts(x, *rest, False, False)
    return facts._replace(op="router", hidden=x.shape[1])


def _router(
    backend: Backend, x: Tensor, weight: Tensor, linear_bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    bias, expert_scale, topk_ids, routing, _ = rest
    inputs = RouteInputs(bias, expert_scale, topk_ids)
    logits, routed = backend.router(x, weight, linear_bias, Routing.from_json(routing), inputs)
    return logits, routed.weights, routed.ids


def _fake_router(
    x: Tensor, weight: Tensor, linear_bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    *route, needs_grad = rest
    logits = weight.new_empty(x.shape[0], weight.shape[0])
    bias, expert_scale, topk_ids, routing = route
    weights, ids, _, _ = _fake_route(
        logits, bias, expert_scale, topk_ids, routing, False, False, needs_grad
    )
    return logits, weights, ids


Operation(
    "router",
    "Tensor x, Tensor weight, Tensor? linear_bias, Tensor? bias, Tensor? expert_scale, "
    "Tensor? topk_ids, str routing",
    "(Tensor, Tensor, Tensor)",
    facts=_router_facts,
    compute=_router,
    fake=_fake_router,
    differentiable=(0, 1, 2, 4),
    differentiated=(0, 1),
).define(has_out=False)
