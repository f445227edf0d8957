"""Say which backend a layer or a problem would get under the options in force, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..activation import Activation
from ..checks import expect, expect_size, expect_type
from ..formats import QuantizedTensor
from ..options import current
from .measure import known_times
from .prepared import backends_at
from .problem import Machine, Problem, token_bucket
from .resolve import Candidate, Decision, resolve
from .tuned import tuned_settings


def explain(layer_or_problem: nn.Module | Problem, num_tokens: int = 64) -> Decision:
    """What would run, and what every other backend says: ``print(tmoe.explain(layer))``.

    A layer is a `tmoe.MoE` or `tmoe.Experts`, an experts module of transformers, or a block that
    has one as its ``experts``; it is described for `num_tokens` tokens, on its device, with
    gradients if they are enabled and a parameter requires them. One that `tmoe.parallel` divided
    also says which exchange runs where the fullest rank has `num_tokens`. A `Problem` has its own
    number of tokens.

    Raises ``TypeError`` for anything else, ``ValueError`` for a module without such weights, and
    `NoBackendError` where nothing can run.
    """
    expect_type(layer_or_problem, (nn.Module, Problem), "explain", "layer_or_problem")
    expect_size(num_tokens, "explain", "num_tokens", least=0)
    if isinstance(layer_or_problem, nn.Module):
        problem = _describe(layer_or_problem, num_tokens)
    else:
        problem = replace(layer_or_problem, tokens=token_bucket(layer_or_problem.tokens))
    decision = resolve(problem, current().backend, times=known_times(problem))
    answers = tuple(_with_settings(answer, problem) for answer in decision.candidates)
    experts = getattr(layer_or_problem, "experts", layer_or_problem)
    exchange = getattr(experts, "explain_exchange", None)
    said = exchange(num_tokens, problem.top_k) if exchange else None
    return replace(decision, candidates=answers, exchange=said)


def _with_settings(answer: Candidate, problem: Problem) -> Candidate:
    """The answer, and what is tuned about this backend."""
    settings = tuned_settings(answer.name, problem) if answer.accepted else ""
    return replace(answer, reason=f"{answer.reason}; {settings}") if settings else answer


def _describe(layer: nn.Module, num_tokens: int) -> Problem:
    """The `fused_experts` problem of a layer, read off its weights: a config may differ."""
    experts = getattr(layer, "experts", layer)
    down_proj = getattr(experts, "down_proj", None)
    expect(
        isinstance(down_proj, Tensor) and down_proj.ndim == 3,
        "explain",
        "layer_or_problem",
        "a module with stacked expert weights (down_proj of 3 dimensions)",
        type(layer).__name__,
    )
    assert isinstance(down_proj, Tensor)
    num_local, hidden, intermediate = down_proj.shape
    # transformers' flag for (E, I, H), and that of our classes; see `is_transposed` there.
    if getattr(experts, "stored_transposed", getattr(experts, "is_transposed", False)):
        hidden, intermediate = intermediate, hidden
    activation = getattr(experts, "activation", None)
    asked = current()
    return Problem(
        "fused_experts",
        token_bucket(num_tokens),
        hidden,
        intermediate,
        num_local,
        _top_k(layer, experts),
        down_proj.dtype,
        Machine.of(down_proj.device),
        activation=activation if isinstance(activation, Activation) else None,
        has_bias=getattr(experts, "down_proj_bias", None) is not None,
        weight_on_input=getattr(experts, "weight_on_input", False),
        scheme=experts.scheme if isinstance(down_proj, QuantizedTensor) else None,  # type: ignore
        has_static_scales=all(
            getattr(experts, name, None) is not None for name in ("input_scale", "hidden_scale")
        ),
        prepared=backends_at(_first_projection(experts), down_proj),
        needs_grad=torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters()),
        deterministic=asked.deterministic,
        batch_invariant=asked.batch_invariant,
    )


def _first_projection(experts: nn.Module) -> Tensor:
    return next(
        value
        for name in ("gate_up_proj", "up_proj", "down_proj")
        if isinstance(value := getattr(experts, name, None), Tensor)
    )


def _top_k(layer: nn.Module, experts: nn.Module) -> int:
    """Experts per token; 1 for bare experts, which don't know it."""
    places: tuple[tuple[Any, str], ...] = (
        (getattr(layer, "routing", None), "top_k"),
        (layer, "top_k"),
        (getattr(layer, "gate", None), "top_k"),
        (getattr(experts, "config", None), "num_experts_per_tok"),
    )
    return next(
        (value for place, name in places if isinstance(value := getattr(place, name, None), int)), 1
    )
