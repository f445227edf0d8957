"""Which experts a token goes to: `route` from logits, `router` from the hidden states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import (
    FLOATS,
    INTS,
    autocast,
    autocast_off,
    expect_alike,
    expect_dtype,
    expect_optional,
    expect_same_device,
    needs_grad,
)
from ..checks import expect, expect_type
from ..library import operator, with_shortcut
from ..routing import Routing

_ROUTE, _ROUTER = operator("route"), operator("router")


@with_shortcut
def route(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    topk_ids: Tensor | None = None,
    return_probs: bool = False,
    return_counts: bool = False,
    weights_dtype: torch.dtype | None = None,
    ids_dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, ...]:
    """Choose K experts for each token.

    Args:
        logits: (..., E), any float dtype and strides.
        routing: the recipe; see `tmoe.routing` for what each method computes.
        bias: (E,), any float dtype; added for the selection, never part of a weight. Only for the
            methods that have one.
        expert_scale: (E,), any float dtype; multiplies the weights of the experts. Only for the
            methods that have one (Gemma 4).
        topk_ids: (..., K) int32 or int64, to be used in place of a selection: those of another run
            (routing replay), or of a table (hash routing). The weights are those of the method.
        return_probs: also return the softmax of the logits, for `load_balancing_loss`.
        return_counts: also return how many slots each expert got; `ExpertLoad` adds them up.
        weights_dtype, ids_dtype: of the result. None: float32, or float64 for float64 logits; other
            weights are rounded from these. int32 or int64.

    Returns:
        weights (..., K) and ids (..., K), in descending order of the selection score. Ties go to
        the lower id. A NaN logit counts as -inf; a row without a finite logit has distinct ids and
        weights 0. Given ids out of range come back as -1, with weight 0.
        Where asked for, probs (..., E) float32 and then counts (E,) int32 follow; float64 logits
        give float64 probs.

        Of a rule with `num_shared` experts, S, the logits are (..., E + S) and the weights and ids
        (..., K + S): the shared experts come last, with the ids E, E + 1, ...

    Weights and probs are differentiable in logits and expert_scale, once.

    Raises:
        TypeError, ValueError: with the argument's name, what was wanted and what came.
        NoBackendError: no backend can run it, or the one that `tmoe.options` asks for can't.
    """
    op = "route"
    expect_type(routing, Routing, op, "routing")
    expect_dtype(logits, op, "logits", FLOATS)
    E, K, columns = routing.num_experts, routing.top_k, routing.num_logits
    ok = logits.ndim >= 1 and logits.shape[-1] == columns
    expect(ok, op, "logits", f"of shape (..., {columns})", tuple(logits.shape))
    expect_type(return_probs, bool, op, "return_probs")
    expect_type(return_counts, bool, op, "return_counts")
    lead = logits.shape[:-1]
    _check_route(
        op,
        lead,
        routing,
        {"logits": logits},
        bias=bias,
        expert_scale=expert_scale,
        topk_ids=topk_ids,
    )
    if weights_dtype is None:
        weights_dtype = torch.promote_types(logits.dtype, torch.float32)
    _check_dtypes(op, weights_dtype, ids_dtype)
    weights, ids, probs, counts = _ROUTE(
        logits if logits.ndim == 2 else logits.reshape(-1, columns),
        bias,
        expert_scale,
        None if topk_ids is None else topk_ids.reshape(-1, K),
        routing.json,
        weights_dtype,
        ids_dtype,
        return_probs,
        return_counts,
        needs_grad(logits, expert_scale),
    )
    if logits.ndim != 2:
        shape = (*lead, routing.num_weighed)
        weights, ids = weights.reshape(shape), ids.reshape(shape)
        probs = probs.reshape(*lead, E) if return_probs else probs
    wanted = ((probs,) if return_probs else ()) + ((counts,) if return_counts else ())
    return weights, ids, *wanted


def _check_dtypes(op: str, weights_dtype: Any, ids_dtype: Any) -> None:
    for arg, dtype, dtypes in (
        ("weights_dtype", weights_dtype, FLOATS), ("ids_dtype", ids_dtype, INTS),
    ):  # fmt: skip
        expect_type(dtype, torch.dtype, op, arg)
        if dtype not in dtypes:
            names = " or ".join(str(known).removeprefix("torch.") for known in dtypes)
            expect(False, op, arg, names, dtype)


def _check_route(
    op: str,
    lead: tuple[int, ...],
    routing: Routing,
    first: dict[str, Tensor],
    *,
    bias: Tensor | None,
    expert_scale: Tensor | None,
    topk_ids: Tensor | None,
) -> None:
    """Raise unless these fit the routing, the leading sizes `lead` and the device of `first`."""
    E, K = routing.num_experts, routing.top_k
    rule, name = routing.rule, routing.name
    ok = bias is None or rule.takes_bias
    expect(ok, op, "bias", f"None with {name}, which has no selection bias", "a tensor")
    expect_optional(bias, op, "bias", (E,))
    ok = expert_scale is None or rule.takes_expert_scale
    expect(ok, op, "expert_scale", f"None with {name}, which has no such scale", "a tensor")
    expect_optional(expert_scale, op, "expert_scale", (E,))
    if topk_ids is not None:
        expect_dtype(topk_ids, op, "topk_ids", INTS)
        ok = topk_ids.shape == (*lead, K)
        expect(ok, op, "topk_ids", f"of shape {(*lead, K)}", tuple(topk_ids.shape))
        wanted = "None with topk_ids, since nothing is selected"
        expect(bias is None, op, "bias", wanted, "a tensor")
        wanted = "None with sparsemixer, whose weights come from the selection"
        expect(rule.weight != "sparsemixer", op, "topk_ids", wanted, "a tensor")
    expect_same_device(op, first, bias=bias, expert_scale=expert_scale, topk_ids=topk_ids)


@with_shortcut
def router(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    linear_bias: Tensor | None = None,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    topk_ids: Tensor | None = None,
    weights_dtype: torch.dtype | None = None,
    ids_dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor, Tensor]:
    """The router's linear layer and `route`: two launches for a few tokens, overlapping.

    Args:
        x: (T, H), float32, float16, bfloat16 or float64.
        weight: (E, H). While it is float32 the product is taken in float32, whatever the dtype of x
            and under autocast too, as DeepSeek-V3 has it; otherwise in x's dtype, or autocast's.
        linear_bias: (E,), added to the logits (gpt-oss), in the weight's dtype.
        routing, bias, expert_scale, topk_ids, weights_dtype, ids_dtype: as for `route`.

    Returns:
        logits (T, E) in the dtype of the product, and `route`'s weights and ids.
    """
    op = "router"
    expect_dtype(x, op, "x", FLOATS)
    expect_dtype(weight, op, "weight", FLOATS)
    E = routing.num_logits
    ok = x.ndim == weight.ndim == 2 and weight.shape == (E, x.shape[1])
    expect(ok, op, "weight", f"of shape ({E}, H) for x (T, H)", tuple(weight.shape))
    expect_optional(linear_bias, op, "linear_bias", (E,))
    expect_same_device(op, {"x": x}, weight=weight, linear_bias=linear_bias)
    if weight.dtype != torch.float32:
        x, weight, linear_bias = autocast(x, weight, linear_bias)
        expect_dtype(x, op, "x", (weight.dtype,))
        expect_alike(op, {"x": x}, linear_bias=linear_bias)
    elif linear_bias is not None:
        linear_bias = linear_bias.float()
    if needs_grad(x, weight, linear_bias, expert_scale) or x.dtype == torch.float64:
        with autocast_off(x.device.type):
            logits = F.linear(x.to(weight.dtype), weight, linear_bias)
        weights, ids = route(
            logits, routing, bias=bias, expert_scale=expert_scale, topk_ids=topk_ids,
            weights_dtype=weights_dtype, ids_dtype=ids_dtype,
        )  # fmt: skip
        return logits, weights, ids
    _check_route(
        op, x.shape[:1], routing, {"x": x}, bias=bias, expert_scale=expert_scale, topk_ids=topk_ids
    )
    weights_dtype = torch.float32 if weights_dtype is None else weights_dtype
    _check_dtypes(op, weights_dtype, ids_dtype)
    return _ROUTER(
        x, weight, linear_bias, bias, expert_scale, topk_ids, routing.json,
        weights_dtype, ids_dtype, False,
    )  # fmt: skip
