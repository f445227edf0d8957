"""The FlashInfer that is installed here: imported once, when weights are prepared for it.

What a version takes is known without importing it (`signatures`); what is installed may still
differ, or break on import. So before the first call its functions and enums are looked at as they
are, and a complaint is a reason like any other not to use them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from .signatures import binds


def why_not(entry_point: str, keywords: Iterable[str]) -> str | None:
    """Why the installed function can't be called with these keywords; None: it can be."""
    try:
        function = getattr(_module(), entry_point, None)
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
    has = _parameters(entry_point)
    keywords |= {name: value for name, value in optional.items() if name in has}
    result = getattr(_module(), entry_point)(**keywords)
    return result[0] if isinstance(result, list | tuple) else result


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
def _parameters(entry_point: str) -> frozenset[str]:
    return frozenset(inspect.signature(getattr(_module(), entry_point)).parameters)


def _module() -> ModuleType:
    return import_module("flashinfer.fused_moe")


def _top() -> ModuleType:
    return import_module("flashinfer")


def forget() -> None:
    """Look at what is installed anew: for tests that exchange it."""
    member.cache_clear()
    _parameters.cache_clear()
