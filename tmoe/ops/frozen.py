"""The way of `fused_experts` to the op of frozen weights: quantised in training, or adapted."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..arguments import FLOATS, expect_dtype, expect_same_device, needs_grad
from ..checks import expect, expect_type
from ..formats import QuantizedTensor
from ..formats.recipe import Recipe
from ..library import operator
from ..low_rank import LowRank

_FROZEN, _FROZEN_TRAIN = operator("frozen_experts"), operator("frozen_experts_train")


def run_frozen(
    op: str,
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    tail: tuple[Any, ...],
    adapters: tuple[LowRank | None, LowRank | None],
    scales: tuple[Tensor | None, Tensor | None],
    scheme: str | None,
    spec: tuple[Any, ...],
    *,
    recompute: bool,
) -> Tensor:
    """x (T, H), weights (E, 2I, H) and (E, H, I) of x's dtype or quantised, and what
    `fused_experts` has checked; the adapters are checked here."""
    factors: list[Tensor | None] = []
    for name, weight, adapter in zip(("gate_up", "down"), weights, adapters, strict=True):
        if not isinstance(weight, QuantizedTensor) and needs_grad(weight):
            wanted = f"frozen beside low-rank adapters: {name}_proj.requires_grad_(False)"
            expect(False, op, f"{name}_proj", wanted, "one that requires a gradient")
        pair = _checked(op, f"{name}_lora", adapter, weight, x)
        factors += [None, None] if pair is None else pair
    if isinstance(weights[0], QuantizedTensor) and isinstance(weights[1], QuantizedTensor):
        parts = [weight.parts() for weight in (weights[0], weights[1])]
        words = (scheme, *Recipe.held_by(weights[0]).words[:2])
    else:
        parts, words = [[weight] for weight in weights], ("", "", 0)
    needed = needs_grad(x, *tail, *factors)
    arguments = (x, *parts, *tail, *factors, *scales, *words, *spec)
    y: Tensor
    if needed and not recompute:
        y, _ = _FROZEN_TRAIN(*arguments)
    else:
        y = _FROZEN(*arguments, needed)
    return y


def _checked(
    op: str, arg: str, adapter: Any, weight: Tensor, x: Tensor
) -> tuple[Tensor, Tensor] | None:
    """a and scaling · b in x's dtype."""
    if adapter is None:
        return None
    expect_type(adapter, LowRank, op, arg)
    a, b, scaling = adapter
    E, N, D = weight.shape
    expect_dtype(a, op, f"{arg}.a", FLOATS)
    expect_dtype(b, op, f"{arg}.b", FLOATS)
    rank = a.shape[1] if a.ndim == 3 else 0
    for part, value, shape in (("a", a, (E, rank, D)), ("b", b, (E, N, rank))):
        fits = rank >= 1 and value.shape == shape
        wanted = f"({E}, rank, {D})" if part == "a" else f"({E}, {N}, {rank or 'rank'})"
        expect(fits, op, f"{arg}.{part}", f"of shape {wanted}", tuple(value.shape))
    expect_same_device(op, {"x": x}, **{f"{arg}.a": a, f"{arg}.b": b})
    expect_type(scaling, (int, float), op, f"{arg}.scaling")
    return a.to(x.dtype), (b if scaling == 1 else b * scaling).to(x.dtype)
