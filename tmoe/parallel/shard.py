"""Shard: a rank's part of expert weights: some of the experts, and of each a part of its width.

The width I is cut into whole units: blocks of a quantised weight that share a scale, or 16 numbers,
so that rows stay aligned. Where the units can't be dealt out evenly, the first ranks get one more.
A cut that would go through a block of scales is refused, with the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import expect
from ..formats import FORMATS, QuantizedTensor

OP = "parallelize"
ALIGNED = 16  # numbers of which rows are made where nothing else asks for more


def width_parts(down_proj: Tensor, ranks: int, *, gated_apart: bool) -> list[tuple[int, int]]:
    """For each rank where its part of the width begins and ends; down_proj (E, H, I).

    `gated_apart`: gate and up rows stand one after the other, so that blocks of rows must end with
    the gate.

    Raises:
        ValueError: fewer units than ranks, or gate and up share a block of scales; the message says
            what would do.
    """
    I = down_proj.shape[-1]
    unit, of = _unit(down_proj)
    if unit == 1 and ranks * 2 * ALIGNED <= I:
        unit = ALIGNED
    units = -(-I // unit)
    legal = f"at most {units}: I={I} is {units} units of {unit} {of}"
    expect(ranks <= units, OP, "tp", legal, ranks)
    rows = down_proj.block_shape[0] if isinstance(down_proj, QuantizedTensor) else None
    if ranks > 1 and gated_apart and rows is not None and rows > 1 and I % rows:
        wanted = f"1: I={I} isn't a multiple of {rows}, so gate and up share a block of scales"
        expect(False, OP, "tp", wanted, ranks)
    few, more = divmod(units, ranks)
    ends = [(few * r + min(r, more)) * unit for r in range(ranks + 1)]
    return [(start, min(end, I)) for start, end in zip(ends[:-1], ends[1:], strict=True)]


def _unit(down_proj: Tensor) -> tuple[int, str]:
    if not isinstance(down_proj, QuantizedTensor):
        return 1, "numbers"
    spec, columns = FORMATS[down_proj.format], down_proj.block_shape[1]
    if columns is not None:
        return columns, f"numbers, which share a scale in {spec.name}"
    return (2, "numbers, which share a byte") if spec.is_packed else (1, "numbers")


def take_experts(weight: Tensor, experts: Sequence[int]) -> Tensor:
    """(E, ...) -> the given experts, in that order; a view where they follow each other."""
    first, last = experts[0], experts[-1] + 1
    if list(experts) == list(range(first, last)):
        return weight[first:last]
    return weight[torch.tensor(experts, device=weight.device)]


def first_rows(
    weight: Tensor, part: tuple[int, int], I: int, *, gated: bool, interleaved: bool
) -> Tensor:
    """Of the first projection (E, 2I or I, ...), or its bias, the rows of a part of the width."""
    start, end = part
    if (start, end) == (0, I):
        return weight
    if not gated:
        return weight[:, start:end]
    if interleaved:
        return weight[:, 2 * start : 2 * end]
    return torch.cat([weight[:, start:end], weight[:, I + start : I + end]], 1)


def down_columns(weight: Tensor, part: tuple[int, int]) -> Tensor:
    """Of down_proj (E, H, I) the columns of a part of the width."""
    start, end = part
    return weight if (start, end) == (0, weight.shape[-1]) else weight[..., start:end]


def whole(weight: Tensor) -> Tensor:
    """A tensor of its own, contiguous, so that what it was cut from can be let go."""
    if isinstance(weight, QuantizedTensor):
        return weight._with_parts([_own(part) for part in weight.parts()])
    return _own(weight)


def _own(part: Tensor) -> Tensor:
    if part.untyped_storage().nbytes() > part.nbytes:
        return part.clone(memory_format=torch.contiguous_format)
    return part.contiguous()
