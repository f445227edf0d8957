"""What PyTorch may do with a `QuantizedTensor`: move it, copy it, cut it and join it.

`IMPLEMENTED` is the whole list. Every operation acts on codes and scales alike: along the expert
dimension, which all of them have, or between blocks that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .quantized_tensor import QuantizedTensor

from .pieces import cut, join, stack

aten = torch.ops.aten


# What PEFT does with the parameters that its adapters are for.
_OF_ADAPTERS = (aten.baddbmm.default, aten.add.Tensor, aten.add_.Tensor)


def refuse(func: Any, why: str = "isn't implemented") -> NoReturn:
    instead = "call .dequantize() first for an ordinary tensor"
    if func in _OF_ADAPTERS:
        instead += "; low-rank adapters beside codes are made by tmoe.lora.add"
    raise NotImplementedError(f"QuantizedTensor: {func} {why}; {instead}")


def _copy(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    """Copies and aliases. The dtype is nominal and never reaches codes or scales."""
    dtype = kwargs.pop("dtype", None) or q.dtype
    if not dtype.is_floating_point:
        refuse(func, f"can't give it the dtype {dtype}")
    return q._map(lambda part: func(part, *args, **kwargs), dtype=dtype)


def _view(func: Any, q: QuantizedTensor, size: Any) -> QuantizedTensor:
    if tuple(size) != tuple(q.shape):
        refuse(func, f"can't give {tuple(q.shape)} the shape {tuple(size)}")
    return q._map(lambda part: part.view(part.shape))


def _slice(
    func: Any,
    q: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> QuantizedTensor:
    dim %= q.ndim
    if dim >= q.ndim - 2 and step == 1:
        return cut(q, dim - q.ndim, start, end)
    return _by_expert(func, q, dim, start, end, step)


def _split(func: Any, q: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    dim %= q.ndim
    if dim >= q.ndim - 2:
        starts = range(0, max(q.shape[dim], 1), size)
        return [cut(q, dim - q.ndim, start, start + size) for start in starts]
    return _into_pieces(func, q, size, dim)


def _join(func: Any, tensors: list[Any], dim: int = 0) -> QuantizedTensor:
    _expect_all_quantized(func, tensors)
    dim %= tensors[0].ndim
    if dim != 0 or tensors[0].ndim < 3:
        if dim != tensors[0].ndim - 2:
            refuse(func, f"joins experts or rows, got dimension {dim} of {tensors[0].ndim}")
        dim = -2
    return join(tensors, dim)


def _stack(func: Any, tensors: list[Any], dim: int = 0) -> QuantizedTensor:
    _expect_all_quantized(func, tensors)
    if dim != 0:
        refuse(func, f"puts matrices into a new first dimension, got {dim}")
    return stack(tensors)


def _expect_all_quantized(func: Any, tensors: list[Any]) -> None:
    plain = next((t for t in tensors if not hasattr(t, "block_shape")), None)
    if plain is not None:
        refuse(func, f"can't join a {plain.dtype} tensor")


def _by_expert(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    """select, slice and index_select, whose first argument is the dimension."""
    _expect_expert_dim(func, q, args[0] if args else kwargs.get("dim", 0))
    return q._map(lambda part: func(part, *args, **kwargs))


def _index(func: Any, q: QuantizedTensor, indices: list[Tensor | None]) -> QuantizedTensor:
    only_first = indices[0] is not None and all(index is None for index in indices[1:])
    if not only_first or indices[0].ndim != 1:  # type: ignore[union-attr]
        refuse(func, "takes one list of experts")
    _expect_expert_dim(func, q, 0)
    return q._map(lambda part: func(part, indices[:1]))


def _into_pieces(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> list[QuantizedTensor]:
    """unbind and split: a list of pieces for each part becomes a list of tensors."""
    dim = kwargs.get("dim", args[-1] if len(args) == _DIM_POSITION[func] else 0)
    _expect_expert_dim(func, q, dim)
    pieces = zip(*(func(part, *args, **kwargs) for part in q.parts()), strict=True)
    return [q._with_parts(piece) for piece in pieces]


def _copy_(func: Any, q: QuantizedTensor, source: Any, non_blocking: bool = False) -> Any:
    """Same format, same shapes, so nothing is converted. This is what load_state_dict calls."""
    if not (isinstance(source, type(q)) and q._is_like(source)):
        what = source if isinstance(source, type(q)) else f"a {source.dtype} tensor"
        refuse(func, f"can't write {what} into {q}")
    for part, new in zip(q.parts(), source.parts(), strict=True):
        part.copy_(new, non_blocking)
        if not part.is_inference():
            # Down here autograd doesn't count what is written; `dispatch.prepared` has to know.
            torch.autograd.graph.increment_version(part)
    return q


def _equal(func: Any, q: QuantizedTensor, other: Any) -> bool:
    """The same format and the same bytes; other codes may stand for the same values."""
    if not (isinstance(other, type(q)) and q._is_like(other)):
        return False
    parts = zip(q.parts(), other.parts(), strict=True)
    return all(torch.equal(_bytes(mine), _bytes(theirs)) for mine, theirs in parts)


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().reshape(-1).view(torch.uint8)


def _expect_expert_dim(func: Any, q: QuantizedTensor, dim: int) -> None:
    if q.ndim < 3 or dim % q.ndim != 0:
        refuse(func, f"is for dimension 0 of (experts, rows, columns), got {dim} of {q.ndim}")


_DIM_POSITION = {aten.unbind.int: 1, aten.split.Tensor: 2}  # arguments up to `dim`

IMPLEMENTED: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _copy,
    aten.alias.default: _copy,
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.empty_like.default: _copy,
    aten.view.default: _view,
    aten.select.int: _by_expert,
    aten.slice.Tensor: _slice,
    aten.index_select.default: _by_expert,
    aten.index.Tensor: _index,
    aten.unbind.int: _into_pieces,
    aten.split.Tensor: _split,
    aten.cat.default: _join,
    aten.stack.default: _stack,
    aten.copy_.default: _copy_,
    aten.equal.default: _equal,
}
