"""How checks ask and compare, and what they say when an answer isn't right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

UNFINISHED = "it returns nothing yet. Put your code in place of the dots and return the result."


class Wrong(Exception):
    """An answer isn't right, and why."""


def ask(answer: Callable[..., Any], *arguments: Any) -> Any:
    """What the learner's function returns; `Wrong` if that is nothing."""
    result = answer(*arguments)
    if result is None or result is Ellipsis:
        raise Wrong(UNFINISHED)
    return result


def expect(ok: bool, sentence: str) -> None:
    if not ok:
        raise Wrong(sentence)


def compare(got: Any, wanted: Any, case: str, mistakes: dict[str, Any] | None = None) -> None:
    """Raise `Wrong` unless `got` is `wanted`, a number, a list or a tensor.

    case: what was asked, in words. mistakes: results of typical mistakes, by what to say of them.
    """
    if _same(got, wanted):
        return
    for hint, mistaken in (mistakes or {}).items():
        if _same(got, mistaken):
            raise Wrong(f"{hint} ({case})")
    raise Wrong(f"for {case} it should be {_text(wanted)}, but it is {_text(got)}.")


def compare_tensors(
    got: Any, wanted: Tensor, case: str, mistakes: dict[str, Tensor] | None = None
) -> None:
    """The same for tensors of floats, which may differ by rounding; names the first difference."""
    if not isinstance(got, Tensor):
        raise Wrong(f"it should return a tensor, and returns {type(got).__name__}.")
    if got.shape != wanted.shape:
        raise Wrong(f"for {case} the shape should be {_shape(wanted)}, but it is {_shape(got)}.")
    if _close(got, wanted):
        return
    for hint, mistaken in (mistakes or {}).items():
        if mistaken.shape == got.shape and _close(got, mistaken):
            raise Wrong(f"{hint} ({case})")
    off = ~torch.isclose(got.double().cpu(), wanted.double().cpu(), rtol=1e-4, atol=1e-5)
    place = tuple(off.nonzero()[0].tolist())
    numbers = f"{wanted[place].item():.5g}, but it is {got[place].item():.5g}"
    raise Wrong(f"for {case} the value at {list(place)} should be {numbers}.")


def _same(got: Any, wanted: Any) -> bool:
    got, wanted = _plain(got), _plain(wanted)
    if isinstance(wanted, list):
        same_kind = isinstance(got, list) and len(got) == len(wanted)
        return same_kind and all(map(_same, got, wanted))
    if isinstance(wanted, float):
        return isinstance(got, (int, float)) and abs(got - wanted) <= 1e-6 * max(1.0, abs(wanted))
    return got == wanted


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return list(value) if isinstance(value, (tuple, range)) else value


def _close(got: Tensor, wanted: Tensor) -> bool:
    got, wanted = got.double().cpu(), wanted.double().cpu()
    return torch.allclose(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def _shape(value: Tensor) -> str:
    return str(tuple(value.shape))


def _text(value: Any) -> str:
    value = _plain(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
