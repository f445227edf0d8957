"""First use: a backend that isn't ours is compared with Triton before it runs an operation.

`verify.py` does that for expert layers, when their weights are prepared. Here it is for operations
that need no preparation: once per kind of problem and process, in the call that would use the
backend first, on a few made-up inputs. They are such that differences show: equal scores, lost
rows, experts without rows, blocks of zeros and of the smallest and largest numbers, NaN and
infinities. What is made of these is part of an operation too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import registry
from ..formats import QuantizedTensor
from ..formats.compute import quantize_parts
from ..formats.scheme import SCHEMES
from . import verify
from .problem import Problem, RouteInputs
from .resolve import NoBackendError

WEIGHT_BOUND = 2.0**-16  # of a routing weight; fp32 rounds a sum of 8 by less
ROWS = (3, 0, 132, 1, 0, 41)  # of each expert; a multiple of no tile, one of 4


class NotComparedError(NoBackendError):
    """A backend was chosen that should be compared first, and can't be now."""


def is_compared(name: str) -> bool:
    """Whether the backend has to be compared before its first use."""
    return getattr(registry.load(name), "is_compared", False)


def may_use(name: str, problem: Problem, device: torch.device) -> bool:
    """Whether results of `name`, a backend that accepts the problem, are Triton's, as far as they
    are to be compared. Says so in a warning, once, if they aren't.

    Raises `NotComparedError` while a CUDA graph is captured, if they weren't compared before.
    """
    if not is_compared(name) or verify.is_known(name, problem):
        return True  # it wouldn't accept what was found wrong
    if _is_captured(device):
        raise NotComparedError(
            f"{name} is compared with Triton before its first use, which can't be while a CUDA "
            f"graph is captured: run {problem} once before that"
        )
    with torch.no_grad():
        reason = _difference(name, problem, device)
    verify.remember(name, problem, reason)
    return reason is None


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _difference(name: str, problem: Problem, device: torch.device) -> str | None:
    samples, differ = {
        "route": (_logits, _routed_differ),
        "quantize": (_numbers, _codes_differ),
        "grouped_gemm": (_rows, _products_differ),
    }[problem.op]
    for arguments in samples(problem, device):
        try:
            got, want = (_results(which, problem.op, arguments) for which in (name, "triton"))
        except Exception as error:  # noqa: BLE001  a kernel that isn't built, a launcher's check, …
            return f"it failed when it was compared: {error}"
        if reason := differ(got, want):
            return reason
    return None


def _results(name: str, op: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    result = getattr(registry.load(name), op)(*arguments)
    values = result if isinstance(result, tuple) else (result,)
    return [value.cpu() for value in values if value is not None]


# route --------------------------------------------------------------------------------------------


def _logits(problem: Problem, device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Logits, routing and bias: any; equal ones; NaN, infinite and very low ones."""
    routing, generator = problem.routing, torch.Generator().manual_seed(0)
    assert routing is not None
    E = routing.num_logits
    logits = torch.randn(48, E, generator=generator)
    logits[16:24] = logits[16:24].round()
    logits[24] = 0.0
    logits[25:28, : E // 2] = torch.nan
    logits[28:30, ::3] = -torch.inf
    logits[30, 0], logits[31, E - 1] = torch.inf, torch.inf
    logits[32], logits[33] = torch.nan, -torch.inf
    logits[34:] -= torch.linspace(0, 40, 14)[:, None]
    bias = 0.1 * torch.randn(routing.num_experts, generator=generator)
    for given in (bias, bias.round(decimals=1), None) if problem.has_bias else (None,):
        inputs = RouteInputs(None if given is None else given.to(device))
        yield logits.to(device, problem.dtype), routing, inputs


def _routed_differ(got: list[Tensor], want: list[Tensor]) -> str | None:
    (weights, ids), (our_weights, our_ids) = got, want
    changed = int((ids != our_ids).any(dim=1).sum())
    if changed:
        return f"{changed} of {len(ids)} tokens get other experts, or in another order"
    off = ((weights - our_weights).abs() / our_weights).nan_to_num(nan=torch.inf)
    worst = torch.where(weights == our_weights, 0.0, off).max().item()
    if worst > WEIGHT_BOUND:
        return f"a weight is {worst:.2g} of itself away from Triton's, more than {WEIGHT_BOUND:.2g}"
    return None


# quantize -----------------------------------------------------------------------------------------


def _numbers(problem: Problem, device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Rows of blocks: any; of all exponents; zeros, codes and ties as they are; lost ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 256, generator=generator)
    info = torch.finfo(problem.dtype)
    low, high = torch.tensor([info.smallest_normal, info.max]).log2().tolist()
    x[8:24] *= torch.linspace(low, high - 3, 128).exp2().repeat_interleave(32).view(16, 256)
    x[24], x[25, ::2] = 0.0, -0.0
    x[26:30] = torch.arange(-512, 512).view(4, 256) / 64  # ties of e2m1 and of e4m3
    yield _quantized(x, problem, device)
    for lost in (torch.inf, -torch.inf, torch.nan):
        x[30:34, ::33] = lost
        yield _quantized(x, problem, device)


def _quantized(x: Tensor, problem: Problem, device: torch.device) -> tuple[Any, ...]:
    return x.to(device, problem.dtype), problem.recipe, None, None


def _codes_differ(got: list[Tensor], want: list[Tensor]) -> str | None:
    for what, values, ours in zip(("codes", "scales"), got, want, strict=True):
        changed = values.view(torch.uint8) != ours.view(torch.uint8)
        if changed.any():
            rows = int(changed.flatten(1).any(dim=1).sum())
            return f"{what} in {rows} of {len(changed)} rows aren't Triton's"
    return None


# grouped_gemm -------------------------------------------------------------------------------------


def _rows(problem: Problem, device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Rows, quantised weights and offsets: a row and experts of very different size, and a tail."""
    generator = torch.Generator().manual_seed(0)
    E, N, D, S = len(ROWS), 128, 256, sum(ROWS) + 5
    a = torch.randn(S, D, generator=generator) * torch.randn(S, 1, generator=generator).exp()
    weights = torch.randn(E, N, D, generator=generator)
    weights *= torch.arange(1.0, E + 1)[:, None, None]
    recipe = SCHEMES[problem.scheme or ""].weights[0]
    weights = weights.to(device, problem.dtype)
    parts = quantize_parts(weights, recipe, None, None)
    block = recipe.block_shape
    b = QuantizedTensor(*parts, recipe.format.name, block, weights.shape, weights.dtype)
    offsets = torch.tensor([0, *ROWS]).cumsum(0).int()
    arguments = a.to(device, problem.dtype), b, offsets.to(device), None, None, problem.scheme
    yield arguments


def _products_differ(got: list[Tensor], want: list[Tensor]) -> str | None:
    return verify.distance(got[0].float(), want[0].float(), verify.BOUNDS["bf16"])
