"""What `tmoe.prepare` and `tmoe.autotune` do with a layer's weights before its call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from .. import registry
from ..dispatch import prepared
from ..dispatch.prepared import ExpertWeights
from ..dispatch.problem import Problem
from ..dispatch.verify import verify
from ..options import current


def prepare_weights(
    weights_of: Callable[..., ExpertWeights],
    compute: Callable[..., Tensor],
    problem: Problem,
    names: Iterable[str],
    every: bool,
    *arguments: Any,
) -> None:
    """Prepare the weights of a call for the first of `names` that can take it, or for every one.

    A backend that needs no preparation ends the search as well: it is preferred to all that follow.
    `weights_of` and `compute` take the call's arguments, `compute` a backend before and `out`
    behind them.
    """
    x, weights = arguments[0], weights_of(*arguments)

    def run(name: str, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        rest = arguments[1:3] + (topk_weights, topk_ids) + arguments[5:]
        return compute(registry.load(name), x, *rest, None)

    for name in names:
        try:
            backend = registry.load(name)
        except ImportError:
            continue
        if not hasattr(backend, "prepare"):
            usable = backend.why_not(problem) is None
        else:
            usable = name in problem.prepared or _prepare(backend, weights, problem)
            if usable and name not in problem.prepared and current().verify:
                usable = verify(name, problem, run, x.device)
                if not usable:
                    prepared.drop(name, weights)
        if usable and not every:
            prepared.keep_only(name, weights)
            return


def _prepare(backend: Any, weights: ExpertWeights, problem: Problem) -> bool:
    """Whether `backend` now holds the weights."""
    if backend.why_not_prepare(problem) is not None:
        return False
    try:
        backend.prepare(weights, problem)
    except Exception as error:  # noqa: BLE001  a value that it can't express, no memory, no compiler
        warnings.warn(f"{backend.name} can't take these weights: {error}", stacklevel=4)
        return False
    return True
