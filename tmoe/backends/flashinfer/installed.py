"""The FlashInfer that is installed here: imported once, when something is prepared for it.

What a version takes is known without importing it (`signatures`); what is installed may still
differ, or break on import. So before the first call its functions and enums are looked at as they
are, and a complaint is a reason like any other not to use them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from .signatures import binds

_HOMES = ("flashinfer.fused_moe", "flashinfer.gemm", "flashinfer")  # of functions


def why_not(entry_point: str, keywords: Iterable[str]) -> str | None:
    """Why the installed function can't be called with these keywords; None: it can be."""
    try:
        function = _function(entry_point)
    except Exception as error:  # noqa: BLE001  a package that breaks on import raises anything
        return f"FlashInfer can't be imported: {error}"
    if function is None:
        return f"the installed FlashInfer has no {entry_point}"
    complaint = binds(inspect.signature(function), keywords)
    return complaint and f"the installed {entry_point} can't be called: {complaint}"


def call(entry_point: str, keywords: dict[str, Any], optional: dict[str, Any]) -> Any:
    """Call a function by keywords, with those of `optional` that it has; the first of its results.

    FlashInfer's functions return a tensor or a list of them, by version.
    """
    return call_for_all(entry_point, keywords, optional)[0]


def call_for_all(
    entry_point: str, keywords: dict[str, Any], optional: dict[str, Any]
) -> tuple[Any, ...]:
    """As `call`, but all results."""
    function = _function(entry_point)
    if function is None:
        raise AttributeError(f"the installed FlashInfer has no {entry_point}")
    has = _parameters(function)
    keywords |= {name: value for name, value in optional.items() if name in has}
    result = function(**keywords)
    return tuple(result) if isinstance(result, list | tuple) else (result,)


def interleave_w4_weights(codes: Tensor) -> Tensor:
    """FP4 weights (E, rows, K/2) as this version's mixed GEMM for Hopper reads them; on a GPU."""
    result: Tensor = _module().interleave_moe_weights_for_sm90_mixed_gemm(codes, "fp4")
    return result


def interleave_w4_scales(scale: Tensor, group_size: int) -> Tensor:
    """Scales (E, rows, K/group_size), one byte each, for the same kernel."""
    result: Tensor = _module().interleave_moe_scales_for_sm90_mixed_gemm(
        scale, group_size=group_size
    )
    return result


@cache
def member(enum: str, name: str) -> int:
    """The number of an enum's member, which changes from version to version.

    Raises ``AttributeError`` where this version hasn't got it.
    """
    return int(getattr(getattr(_module(), enum, None) or getattr(_top(), enum), name))


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


@cache
def _function(entry_point: str) -> Callable[..., Any] | None:
    """The function, from the first module that has it."""
    for home in _HOMES:
        function: Callable[..., Any] | None = getattr(import_module(home), entry_point, None)
        if function is not None:
            return function
    return None


def _module() -> ModuleType:
    return import_module("flashinfer.fused_moe")


def _top() -> ModuleType:
    return import_module("flashinfer")


def forget() -> None:
    """Look at what is installed anew: for tests that exchange it."""
    member.cache_clear()
    _function.cache_clear()
    _parameters.cache_clear()
