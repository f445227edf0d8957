"""Verify: before a closed kernel is used, compare what it computes with what ours does.

The layer's own weights, a few random tokens, once per kind of layer and process. The tokens are
such that what has gone wrong in the past shows: routing weights far from 1 (one that is applied
twice or never changes every row), one token and several, experts of other ranks, a token without
any expert, and inputs so large that the activation's limit matters, if it has one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..formats.scheme import SCHEMES
from .problem import Problem

# How far a row may be off: a step of the format that hidden rows are rounded to, or of what is
# rounded before them, since two right kernels differ in that. Faults change a row by a third.
BOUNDS = {"bf16": 2.0**-6, "e4m3": 2.0**-3, "e2m1": 2.0**-2}

Run = Callable[[str, Tensor, Tensor, Tensor], Tensor]  # (backend, x, topk_weights, topk_ids)

_findings: dict[tuple[str, Problem], str] = {}  # what is wrong; "": nothing


def refusal(backend: str, problem: Problem) -> str | None:
    """What was found wrong with `backend` for such layers, or None."""
    return _findings.get((backend, _kind(problem))) or None


def is_known(backend: str, problem: Problem) -> bool:
    """Whether `backend` was compared for such problems before."""
    return (backend, _kind(problem)) in _findings


def remember(backend: str, problem: Problem, reason: str | None) -> None:
    """What was found; a reason is said in a warning, and by `refusal` from then on."""
    _findings[backend, _kind(problem)] = reason or ""
    if reason is not None:
        warnings.warn(f"{backend} isn't used for {problem}: {reason}", stacklevel=4)


def verify(backend: str, problem: Problem, run: Run, device: torch.device) -> bool:
    """Whether `backend` agrees with Triton on this layer; if not, a warning says so once, and
    `refusal` from then on."""
    reason = _disagreement(backend, problem, run, device)
    remember(backend, problem, reason)
    return reason is None


def forget() -> None:
    """Verify everything anew."""
    _findings.clear()


def _disagreement(backend: str, problem: Problem, run: Run, device: torch.device) -> str | None:
    bound = BOUNDS[_hidden_element(problem)]
    for tokens in _tokens(problem, device):
        try:
            got = run(backend, *tokens).float()
        except Exception as error:  # noqa: BLE001  a kernel that isn't built, a launcher's check, …
            return f"it failed when it was verified: {error}"
        want = run("triton", *tokens).float()
        if reason := distance(got, want, bound):
            return reason
    return None


def distance(got: Tensor, want: Tensor, bound: float) -> str | None:
    """What is wrong with rows that are further from Triton's than `bound`, relative to their norm;
    None: none are."""
    off = (got - want).norm(dim=1) / want.norm(dim=1)
    off = torch.where((got == want).all(dim=1), 0.0, off)  # 0 / 0: a token without experts
    worst = off.nan_to_num(nan=torch.inf).max().item()
    if worst <= bound:
        return None
    return f"its result is {worst:.2g} of a row away from Triton's, more than {bound}"


def _hidden_element(problem: Problem) -> str:
    inputs = None if problem.scheme is None else SCHEMES[problem.scheme].inputs
    return "bf16" if inputs is None else inputs.format.element.name


def _tokens(problem: Problem, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x, topk_weights and topk_ids: always the same ones, and enough for most experts."""
    generator = torch.Generator().manual_seed(0)
    many = max(problem.num_experts // problem.top_k, 4)
    has_limit = problem.activation is not None and problem.activation.limit != math.inf
    for T, size in ((1, 1.0), (many, 1.0), (many, 16.0))[: 3 if has_limit else 2]:
        x = size * torch.randn(T, problem.hidden, generator=generator)
        weights = 0.1 + 0.4 * torch.rand(T, problem.top_k, generator=generator)
        ids = torch.rand(T, problem.num_experts, generator=generator).argsort(dim=1)
        ids = ids[:, : problem.top_k].int()
        if T > 1:
            ids[1] = -1
        yield x.to(device, problem.dtype), weights.to(device), ids.to(device)


def _kind(problem: Problem) -> Problem:
    """The problem without what the same kernel and the same layout serve."""
    same = replace(problem, tokens=0, prepared=(), deterministic=False, batch_invariant=False)
    if problem.op == "fused_experts":
        return same
    return replace(same, hidden=0, intermediate=0, num_experts=0)
