"""Shortcut: a call of a public function like an earlier one goes straight to its launches.

Between a public function and the launches of a backend stand the checks of its arguments, torch's
dispatcher and the choice of the backend. With few tokens that takes the host longer than the layer
takes the GPU, and depends on what kinds of tensors come, never on what is in them. So where a
backend can replay a call, and the call handed its tensors through as they were, the next one with
tensors of the same kinds is replayed at once.

Whatever else a call depends on is looked at each time; where someone looks on or changes what an
operation does, such as a profiler, a mode, a tracer or autograd, the call takes the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..dispatch import prepared
from ..dispatch.backend import Replayed
from ..dispatch.measure import tuning, when_times_change
from ..dispatch.prepared import preparing
from ..formats import QuantizedTensor
from ..low_rank import LowRank
from ..options import current

MOST_KINDS = 1024
DEVICES = ("cuda",)  # on which Python is what a call may wait for
P = ParamSpec("P")
R = TypeVar("R")
Way = Callable[[list[Tensor]], Any]  # from a call's tensors to its result; None: it isn't open

_ways: dict[tuple[Any, ...], Way] = {}
when_times_change(_ways.clear)
_replayed: ContextVar[list[Replayed] | None] = ContextVar("tmoe_replayed", default=None)


def _closed(tensors: list[Tensor]) -> None:
    """The way of calls that have none."""


def _unknown(tensors: list[Tensor]) -> None:
    """Stands for the way of calls of which none came yet."""


def note(replayed: Replayed) -> None:
    """Tell the public function that is being called what its operation did."""
    noted = _replayed.get()
    if noted is not None:
        noted.append(replayed)


def with_shortcut(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, by a shortcut where there is one."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or _is_seen():
            return function(*args, **kwargs)
        tensors: list[Tensor] = []
        facts: list[Any] = [function, current(), tuple(kwargs)]
        try:
            plain = _describe(args, facts, tensors) and _describe(kwargs.values(), facts, tensors)
        except RuntimeError:  # a sparse or nested tensor, which the function will refuse
            plain = False
        if not plain:
            return function(*args, **kwargs)
        if not tensors or tensors[0].device.type not in DEVICES:
            return function(*args, **kwargs)
        key = tuple(facts)
        try:
            way = _ways.get(key, _unknown)
        except TypeError:  # an argument can't be hashed: the function will say what it should be
            return function(*args, **kwargs)
        if way is _unknown:
            result, _ways[key] = _learn(function, args, kwargs, tensors)
            return result
        result = way(tensors)
        return function(*args, **kwargs) if result is None else result

    return call


def _is_seen() -> bool:
    """Whether someone looks at operations, or changes what they do."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or _functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
        or torch.is_autocast_enabled("cuda")
        or not prepared.is_empty()
        or preparing()
        or tuning() is not None
    )


def _describe(values: Iterable[Any], facts: list[Any], tensors: list[Tensor]) -> bool:
    """Collect the tensors, and all that a call depends on but what is in them. False: there is a
    tensor for which operations do more than to compute."""
    for value in values:
        kind = value.__class__
        if kind is Tensor or kind is Parameter:
            address = value.data_ptr()
            if not address or value.is_neg() or (value.requires_grad and torch.is_grad_enabled()):
                return False
            tensors.append(value)
            facts += (value.shape, value.stride(), value.dtype, value.device, address % 16)
        elif kind is QuantizedTensor:
            facts += (value.format, value.block_shape, value.shape, value.dtype)
            if not _describe(value.parts(), facts, tensors):
                return False
        elif kind is LowRank:
            if not _describe(value, facts, tensors):
                return False
        elif isinstance(value, Tensor):
            return False
        else:
            facts += (kind, value)
    return True


def _learn(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Any, tensors: list[Tensor]
) -> tuple[Any, Way]:
    """The result of a call the long way, and the way that calls like it can take."""
    noted: list[Replayed] = []
    token = _replayed.set(noted)
    try:
        result = function(*args, **kwargs)
    finally:
        _replayed.reset(token)
    if len(_ways) >= MOST_KINDS:
        _ways.clear()
    return result, _way(noted, tensors, result)


def _way(noted: list[Replayed], tensors: list[Tensor], result: Any) -> Way:
    """The way from `tensors` to `result`, if there is nothing on it but one replay."""
    if len(noted) != 1:
        return _closed
    made, recording, inputs = noted[0]
    if recording is None:
        return _closed
    is_tuple = isinstance(result, tuple)
    order = _indices(inputs, tensors)
    picks = _indices(result if is_tuple else (result,), made)
    changes_an_input = any(x is tensor for x in made for tensor in tensors)
    if order is None or picks is None or changes_an_input:
        return _closed

    def way(tensors: list[Tensor]) -> Any:
        if not recording.fits():
            return None
        made = recording.replay([tensors[i] for i in order])
        if made is None:
            return None
        return tuple([made[i] for i in picks]) if is_tuple else made[picks[0]]

    return way


def _indices(values: Sequence[Any], among: Sequence[Any]) -> list[int] | None:
    """Where each of the values stands among others; None if one doesn't, or if one of those
    stands there twice: in another call these may be two."""
    places = {id(other): i for i, other in enumerate(among)}
    if len(places) < len(among) or not all(id(value) in places for value in values):
        return None
    return [places[id(value)] for value in values]
