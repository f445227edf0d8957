"""How checks ask and compare, and what they say when an answer isn't right.

A learner's function may do anything: return nothing, or a thing of another kind, change what it is
given, or stop with an error. Whatever it does, the check answers with a sentence.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

UNFINISHED = "it returns nothing yet. Put your code in place of the dots and return the result."


class Wrong(Exception):
    """An answer isn't right, and why."""


def run(answer: Callable[..., Any], *arguments: Any) -> Any:
    """What the learner's function makes of copies of the arguments; `Wrong` if it raises."""
    try:
        result = answer(*deepcopy(arguments))
        return list(result) if isinstance(result, Iterator) else result
    except Exception as error:  # whatever may be wrong with the answer
        raise Wrong(stopped(answer, error)) from error


def stopped(answer: Any, error: Exception) -> str:
    """What happened, and in which line of the learner's."""
    cause = error.__cause__ or error  # Triton's interpreter wraps what happened
    code = getattr(getattr(answer, "fn", answer), "__code__", None)  # of a function or a kernel
    frames = traceback.extract_tb(cause.__traceback__)
    own = [f.line for f in frames if code is not None and f.filename == code.co_filename and f.line]
    where = f" in the line `{own[-1].strip()}`" if own else ""
    words = str(cause).strip().partition("\n")[0]
    return f"it stops{where} with {type(cause).__name__}: {words}"


def ask(answer: Callable[..., Any], *arguments: Any) -> Any:
    """The same; `Wrong` too if the result is nothing."""
    result = run(answer, *arguments)
    if result is None or result is Ellipsis:
        raise Wrong(UNFINISHED)
    return result


def ask_number(answer: Callable[..., Any], *arguments: Any) -> float:
    """The same as a float; `Wrong` if the result isn't one number."""
    result = _plain(ask(answer, *arguments))
    if isinstance(result, (bool, int, float)):
        return float(result)
    raise Wrong(f"it should return a number, and returns {_kind(result)}: {text(result)}.")


def ask_list(answer: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The same as a list; `Wrong` if the result is nothing of the kind."""
    result = _plain(ask(answer, *arguments))
    if isinstance(result, list):
        return result
    raise Wrong(f"it should return a list, and returns {_kind(result)}: {text(result)}.")


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
    raise Wrong(f"for {case} it should be {text(wanted)}, but it is {text(got)}.")


def compare_tensors(
    got: Any, wanted: Tensor, case: str, mistakes: dict[str, Tensor] | None = None
) -> None:
    """The same for tensors of floats, which may differ by rounding; names the first difference."""
    if not isinstance(got, Tensor):
        raise Wrong(f"it should return a tensor, and returns {_kind(got)}.")
    if got.shape != wanted.shape:
        raise Wrong(f"for {case} the shape should be {_shape(wanted)}, but it is {_shape(got)}.")
    if _close(got, wanted).all():
        return
    for hint, mistaken in (mistakes or {}).items():
        if mistaken.shape == got.shape and _close(got, mistaken).all():
            raise Wrong(f"{hint} ({case})")
    place = tuple((~_close(got, wanted)).nonzero()[0].tolist())
    numbers = f"{wanted[place].item():.5g}, but it is {got[place].item():.5g}"
    if got.dtype != wanted.dtype:
        numbers += f"; its dtype is {got.dtype}, not {wanted.dtype}"
    raise Wrong(f"for {case} the value at {list(place)} should be {numbers}.")


def _same(got: Any, wanted: Any) -> bool:
    got, wanted = _plain(got), _plain(wanted)
    if isinstance(wanted, list):
        same_kind = isinstance(got, list) and len(got) == len(wanted)
        return same_kind and all(map(_same, got, wanted))
    if isinstance(wanted, float):
        # As exact as 32-bit floats are: who computes with tensors is right too.
        return isinstance(got, (int, float)) and abs(got - wanted) <= 3e-6 * max(1.0, abs(wanted))
    return isinstance(got, type(wanted) | float) and got == wanted


def _plain(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    return list(value) if isinstance(value, (tuple, range, bytes)) else value


def _close(got: Tensor, wanted: Tensor) -> Tensor:
    got, wanted = (t.detach().cpu().to(torch.complex128) for t in (got, wanted))
    return torch.isclose(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def _kind(value: Any) -> str:
    return type(value).__name__


def _shape(value: Tensor) -> str:
    return str(tuple(value.shape))


def text(value: Any) -> str:
    """It on one line, cut off where it gets long."""
    value = _plain(value)
    if isinstance(value, str):
        return repr(value)
    words = f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
    return words if len(words) <= 120 else f"{words[:120]} …"
