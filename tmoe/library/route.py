"""torch.ops.tmoe.route and torch.ops.tmoe.router."""

from __future__ import annotations

from itertools import compress
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
    weights_dtype: torch.dtype, ids_dtype: torch.dtype, *wants: bool,
    op: str = "route", hidden: int = 0,
) -> Facts:  # fmt: skip
    recipe, T = Routing.from_json(routing), logits.shape[0]
    in_use = (scale is not None, ids is not None, *wants)
    return Facts(
        op,
        token_bucket(T),
        hidden,
        0,
        recipe.num_experts,
        recipe.top_k,
        logits.dtype,
        routing=routing,
        extras=tuple(compress(RouteInputs._fields[1:], in_use)),
        has_bias=bias is not None,
    )


def _route(backend: Backend, logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    bias, expert_scale, topk_ids, routing, *dtypes, want_probs, want_counts, _ = rest  # no `out`
    inputs = RouteInputs(bias, expert_scale, topk_ids, want_probs, want_counts, *dtypes)
    weights_dtype, ids_dtype = dtypes
    weights, ids, probs, counts = backend.route(logits, Routing.from_json(routing), inputs)
    probs = logits.new_empty(0, dtype=_wide(logits)) if probs is None else probs
    counts = logits.new_empty(0, dtype=torch.int32) if counts is None else counts
    return weights.to(weights_dtype), ids.to(ids_dtype), probs, counts


def _wide(logits: Tensor) -> torch.dtype:
    """That in which weights and probabilities are computed."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _fake_route(
    logits: Tensor, bias: Tensor | None, scale: Tensor | None, ids: Tensor | None, routing: str,
    weights_dtype: torch.dtype, ids_dtype: torch.dtype, want_probs: bool, want_counts: bool,
    needs_grad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    recipe, T = Routing.from_json(routing), logits.shape[0]
    E = recipe.num_experts
    weights = logits.new_empty((T, recipe.num_weighed), dtype=weights_dtype)
    probs = logits.new_empty((T, E) if want_probs else 0, dtype=_wide(logits))
    counts = logits.new_empty(E if want_counts else 0, dtype=torch.int32)
    return weights, torch.empty_like(weights, dtype=ids_dtype), probs, counts


def _with_chosen_ids(arguments: list[Any], results: tuple[Tensor, ...]) -> list[Any]:
    """The backward selects nothing: it weighs what the forward chose."""
    logits, _, expert_scale, _, routing, *wants = arguments
    top_k, ids = Routing.from_json(routing).top_k, results[1]
    chosen = ids if ids.shape[1] == top_k else ids[:, :top_k]  # without the shared ones
    return [logits, None, expert_scale, chosen, routing, *wants]


def _route_gradients(
    backend: Backend, grads: list[Tensor], arguments: list[Any], wanted: list[bool]
) -> list[Tensor] | None:
    logits, _, expert_scale, topk_ids, routing, *_ = arguments
    find = getattr(backend, "route_backward", None)
    if find is None or wanted != [True, False]:  # that of expert_scale is torch's to find
        return None
    d_weights, d_probs = grads
    more = (Routing.from_json(routing), expert_scale, topk_ids)
    return [find(d_weights, d_probs if d_probs.numel() else None, logits, *more)]


Operation(
    "route",
    "Tensor logits, Tensor? bias, Tensor? expert_scale, Tensor? topk_ids, str routing, "
    "ScalarType weights_dtype, ScalarType ids_dtype, bool want_probs, bool want_counts",
    "(Tensor, Tensor, Tensor, Tensor)",
    facts=_route_facts,
    compute=_route,
    fake=_fake_route,
    differentiable=(0, 2),
    differentiated=(0, 2),
    replay=_with_chosen_ids,
    gradients=_route_gradients,
).define(has_out=False)


# router -------------------------------------------------------------------------------------------


def _router_facts(x: Tensor, weight: Tensor, linear_bias: Tensor | None, *rest: Any) -> Facts:
    return _route_facts(x, *rest, op="router", hidden=x.shape[1])


def _router(
    backend: Backend, x: Tensor, weight: Tensor, linear_bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    bias, expert_scale, topk_ids, routing, weights_dtype, ids_dtype, _ = rest
    inputs = RouteInputs(
        bias, expert_scale, topk_ids, weights_dtype=weights_dtype, ids_dtype=ids_dtype
    )
    logits, routed = backend.router(x, weight, linear_bias, Routing.from_json(routing), inputs)
    return logits, routed.weights.to(weights_dtype), routed.ids.to(ids_dtype)


def _fake_router(
    x: Tensor, weight: Tensor, linear_bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    *route, needs_grad = rest
    logits = weight.new_empty(x.shape[0], weight.shape[0])
    weights, ids, _, _ = _fake_route(*(logits, *route, False, False, needs_grad))
    return logits, weights, ids


Operation(
    "router",
    "Tensor x, Tensor weight, Tensor? linear_bias, Tensor? bias, Tensor? expert_scale, "
    "Tensor? topk_ids, str routing, ScalarType weights_dtype, ScalarType ids_dtype",
    "(Tensor, Tensor, Tensor)",
    facts=_router_facts,
    compute=_router,
    fake=_fake_router,
    differentiable=(0, 1, 2, 4),
    differentiated=(0, 1),
).define(has_out=False)
