"""Cut a `QuantizedTensor` along rows or columns, and join several: codes and scales alike.

Nothing is rounded again, so a cut must not go through a block that shares a scale; where the halves
of the rows (gate and up) have scales of their own, a piece is of one half, and two of them join to
such a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checks import expect
from .format import FORMATS

if TYPE_CHECKING:
    from .quantized_tensor import QuantizedTensor

OP = "QuantizedTensor"


def cut(q: QuantizedTensor, dim: int, start: int | None, end: int | None) -> QuantizedTensor:
    """Rows (dim = -2) or columns (-1) from `start` up to `end`, counted as in ``q[start:end]``.

    Views, no copies. Raises ``ValueError`` where a cut would go through a block.
    """
    start, end, _ = slice(start, end).indices(q.shape[dim])
    parts = _cut_columns(q, start, end) if dim == -1 else _cut_rows(q, start, end)
    return q._with_parts(parts)


def _cut_rows(q: QuantizedTensor, start: int, end: int) -> list[Tensor]:
    rows, lead = q.shape[-2], q.ndim - 2
    data, *scales = q.parts()
    block = q.block_shape[0] or rows
    pieces = [_narrow(data, -2, start, end)]
    for scale in scales:
        if scale.ndim <= lead:  # one for all rows
            pieces.append(scale)
        elif scale.ndim == lead + 1 and _is_of_halves(q, scale):
            pieces.append(_scale_of_a_half(scale, start, end, rows))
        else:
            _expect_whole_blocks(q, "rows", start, end, rows, block)
            dim = -1 if q.block_shape[1] is None else -2
            pieces.append(_narrow(scale, dim, start // block, -(-end // block)))
    return pieces


def _scale_of_a_half(scale: Tensor, start: int, end: int, rows: int) -> Tensor:
    if (start, end) == (0, rows):
        return scale
    half = -(-rows // 2)
    within = end <= half or start >= half
    wanted = f"within one half of {rows} rows, which have scales of their own"
    expect(within, OP, "rows", wanted, f"{start}:{end}")
    return scale[..., int(start >= half)]


def _cut_columns(q: QuantizedTensor, start: int, end: int) -> list[Tensor]:
    columns, block = q.shape[-1], q.block_shape[1]
    data, scale, *more = q.parts()
    per_byte = 2 if FORMATS[q.format].is_packed else 1
    _expect_whole_blocks(q, "columns", start, end, columns, block or per_byte)
    if block is not None:
        scale = _narrow(scale, -1, start // block, -(-end // block))
    return [_narrow(data, -1, start // per_byte, end // per_byte), scale, *more]


def join(tensors: Sequence[Any], dim: int) -> QuantizedTensor:
    """Several along experts (dim = 0) or rows (-2); other sizes, format and blocks are alike.

    Rows can be joined where no block is left partial in between. Two tensors with one scale each
    become halves with scales of their own; more than two with one scale each can't be joined.
    """
    first = tensors[0]
    for other in tensors:
        sizes = [list(q.shape) for q in (first, other)]
        for size in sizes:
            size[dim] = 0
        alike = (first.format, first.block_shape) == (other.format, other.block_shape)
        alike = alike and sizes[0] == sizes[1] and len(first.parts()) == len(other.parts())
        expect(alike, OP, "all tensors", f"alike but for dimension {dim}: {first}", other)
    if len(tensors) == 1:
        return first._with_parts(first.parts())
    kinds = list(zip(*(q.parts() for q in tensors), strict=True))
    if dim == 0:
        return first._with_parts(_join_experts(parts) for parts in kinds)
    return first._with_parts(_join_rows(tensors, list(parts)) for parts in kinds)


def _join_experts(parts: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    expect(len(shapes) == 1, OP, "scales", "one, or one for each half, everywhere", shapes)
    return _as_bytes(torch.cat, parts, 0)


def _join_rows(tensors: Sequence[QuantizedTensor], parts: list[Tensor]) -> Tensor:
    first, lead = tensors[0], tensors[0].ndim - 2
    if parts[0] is first.data:
        return _as_bytes(torch.cat, parts, -2)
    block = first.block_shape[0] if parts[0] is first.scale else None
    if block is None:  # one for all rows of each
        counts = [q.shape[-2] for q in tensors]
        halves = len(parts) == 2 and counts[0] == counts[1] and all(p.ndim == lead for p in parts)
        wanted = "two of as many rows, each with one scale, which stays its half's"
        expect(halves, OP, "tensors", wanted, f"rows {counts}")
        return torch.stack(parts, -1)
    for q in tensors[:-1]:
        wanted = f"a multiple of {block} for {q.format}, but in the last tensor"
        expect(q.shape[-2] % block == 0, OP, "rows", wanted, q.shape[-2])
    return _as_bytes(torch.cat, parts, -1 if first.block_shape[1] is None else -2)


def stack(tensors: Sequence[Any]) -> QuantizedTensor:
    """Matrices of one shape, format and kind of scales as experts (E, M, K)."""
    first = tensors[0]
    for other in tensors:
        expect(first._is_like(other), OP, "all tensors", f"like {first}", other)
    kinds = zip(*(q.parts() for q in tensors), strict=True)
    return first._with_parts(_as_bytes(torch.stack, parts, 0) for parts in kinds)


def _as_bytes(
    function: Callable[[list[Tensor], int], Tensor], parts: Sequence[Tensor], dim: int
) -> Tensor:
    """torch doesn't join 8-bit floats on every device."""
    dtype = parts[0].dtype
    if dtype.itemsize > 1:
        return function(list(parts), dim)
    return function([part.view(torch.uint8) for part in parts], dim).view(dtype)


def _is_of_halves(q: QuantizedTensor, scale: Tensor) -> bool:
    """Of one dimension more than the experts: (..., 2), or the rows' scales (..., M)."""
    return scale is q.global_scale or q.block_shape == (None, None)


def _narrow(x: Tensor, dim: int, start: int, end: int) -> Tensor:
    return x.narrow(dim, start, max(end - start, 0))


def _expect_whole_blocks(
    q: QuantizedTensor, arg: str, start: int, end: int, size: int, block: int
) -> None:
    whole = start % block == 0 and (end % block == 0 or end == size)
    expect(whole, OP, arg, f"cut at multiples of {block} for {q.format}", f"{start}:{end}")
