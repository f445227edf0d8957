"""Weights in a backend's own layout: made once, at load time, and found again in forward.

A layer's weights are known by where they are in memory. What was made of them is dropped when they
are freed, written to, or prepared for another backend, so that nothing is ever computed from
weights that have changed; a call that finds nothing runs on a backend that needs no preparation.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..activation import Activation
from ..formats import QuantizedTensor
from .problem import Problem

Place = tuple[int, int]  # of the codes or numbers of both projections


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A layer's expert weights as tmoe holds them; nothing here is changed.

    Attributes:
        gate_up_proj: (E, 2I, H), rows [gate; up], or (E, I, H) for an ungated activation; bf16,
            fp16 or a `QuantizedTensor`.
        down_proj: (E, H, I) of the same format.
        activation: a name or an `Activation`.
        interleaved: the rows of gate_up_proj and of its bias are g0, u0, g1, u1, ...
        gate_up_bias, down_bias: (E, 2I) or (E, I), and (E, H).
        input_scale, hidden_scale: static scales of the two projections' inputs, one number or
            (E,): fp8_tensor's scale, nvfp4's global scale. Needed for these, None for others.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    activation: str | Activation = "swiglu"
    interleaved: bool = False
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    input_scale: Tensor | float | None = None
    hidden_scale: Tensor | float | None = None

    @property
    def place(self) -> Place:
        return _parts(self.gate_up_proj)[0].data_ptr(), _parts(self.down_proj)[0].data_ptr()

    @property
    def tensors(self) -> list[Tensor]:
        """All of them; codes, scales and global scales one by one."""
        rest = (self.gate_up_bias, self.down_bias, self.input_scale, self.hidden_scale)
        parts = [*_parts(self.gate_up_proj), *_parts(self.down_proj)]
        return parts + [value for value in rest if isinstance(value, Tensor)]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What is held for a layer by a backend."""

    backend: str
    problem: Problem
    num_bytes: int
    value: Any  # the backend's own
    stamp: tuple[object, ...]
    number: int  # of all that were ever prepared

    def __repr__(self) -> str:
        return f"{self.backend}: {self.num_bytes / 2**20:.1f} MiB for {self.problem}"


_preparing: ContextVar[bool] = ContextVar("tmoe_prepare", default=False)


@contextmanager
def prepare() -> Iterator[None]:
    """Inside, the first call of every layer brings its weights into the layout of the backend that
    is preferred on this machine, if that one has its own, and compares a result with Triton's.

        with torch.inference_mode(), tmoe.prepare():
            model(**some_inputs)  # at load time, once

    Later calls of the layer, outside, run on that backend. The layout is a copy of the weights:
    `prepared` lists what is held, `release` lets go of it, and so does a layer that is freed. A
    backend whose result differs, or that can't be called, isn't used; a warning says why, and
    `explain` from then on. With a forced backend the weights are prepared for that one. Calls that
    need gradients, or while a CUDA graph is captured, are left alone. Local to the thread and to
    the asyncio task.
    """
    token = _preparing.set(True)
    try:
        yield
    finally:
        _preparing.reset(token)


def preparing() -> bool:
    """Whether this call is inside `prepare`, and may be repeated."""
    if not _preparing.get():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


_numbers = itertools.count()
_held: dict[Place, dict[str, Prepared]] = {}


def hold(
    backend: str, problem: Problem, weights: ExpertWeights, value: Any, made: Iterable[Tensor]
) -> None:
    """Keep `value`, which consists of the tensors `made`, until the weights change."""
    place, num_bytes = weights.place, sum(t.nbytes for t in made)
    stamp = _stamp(weights.tensors, weights.activation, weights.interleaved)
    entry = Prepared(backend, problem, num_bytes, value, stamp, next(_numbers))
    _held.setdefault(place, {})[backend] = entry
    for tensor in weights.tensors:
        owner = tensor if tensor._base is None else tensor._base  # a view may be gone at once
        # By number: what a finalizer refers to lives as long as the owner, even after `release`.
        weakref.finalize(owner, _drop, place, entry.number).atexit = False


def backends_of(
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    rest: Sequence[Tensor | None],
    activation: Activation,
    interleaved: bool,
) -> tuple[str, ...]:
    """Which backends hold something for exactly these weights, as they are now. In every forward,
    so it takes them in parts: each projection's, then what else `ExpertWeights` has."""
    place = gate_up[0].data_ptr(), down[0].data_ptr()
    entries = _held.get(place)
    if not entries:
        return ()
    tensors = [*gate_up, *down, *(value for value in rest if value is not None)]
    stamp = _stamp(tensors, activation, interleaved)
    for entry in list(entries.values()):
        if entry.stamp != stamp:
            _drop(place, entry.number)
            warnings.warn(
                f"{entry.backend}: weights were written to after they were prepared, or come with "
                f"other biases or scales; run {entry.problem} inside tmoe.prepare() again",
                stacklevel=2,
            )
    return tuple(sorted(entries))


def backends_at(gate_up_proj: Tensor, down_proj: Tensor) -> tuple[str, ...]:
    """Which backends hold something for weights that are there, perhaps changed since then."""
    place = _parts(gate_up_proj)[0].data_ptr(), _parts(down_proj)[0].data_ptr()
    return tuple(sorted(_held.get(place, ())))


def find(backend: str, weights: ExpertWeights) -> Any:
    """What `backend`, one of `backends_of`, holds for these weights."""
    return _held[weights.place][backend].value


def is_empty() -> bool:
    """Whether nothing is held for any layer."""
    return not _held


def prepared() -> list[Prepared]:
    """All that backends hold in layouts of their own: for which layers, and how many bytes."""
    return [entry for entries in _held.values() for entry in entries.values()]


def release(backend: str | None = None) -> None:
    """Free what `backend`, or every backend, holds; its layers run on others until they are
    prepared again."""
    for place in list(_held):
        for entry in list(_held.get(place, {}).values()):
            if backend in (None, entry.backend):
                _drop(place, entry.number)


def drop(backend: str, weights: ExpertWeights) -> None:
    """Free what `backend` holds for these weights."""
    entry = _held.get(weights.place, {}).get(backend)
    if entry is not None:
        _drop(weights.place, entry.number)


def keep_only(backend: str, weights: ExpertWeights) -> None:
    """Free what other backends hold for these weights."""
    for entry in list(_held.get(weights.place, {}).values()):
        if entry.backend != backend:
            _drop(weights.place, entry.number)


def _drop(place: Place, number: int) -> None:
    entries = _held.get(place, {})
    for entry in list(entries.values()):
        if entry.number == number:
            del entries[entry.backend]
    if not entries:
        _held.pop(place, None)


def _stamp(tensors: list[Tensor], *meaning: object) -> tuple[object, ...]:
    """Changes with every change of a layer: where tensors are, how often they were written, what
    they mean."""
    written = [-1 if t.is_inference() else t._version for t in tensors]
    return (*meaning, *[t.data_ptr() for t in tensors], *written)


def _parts(weight: Tensor) -> list[Tensor]:
    return weight.parts() if isinstance(weight, QuantizedTensor) else [weight]
