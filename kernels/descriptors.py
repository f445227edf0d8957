"""Tensor descriptors: what the tensor memory accelerator has to know to copy a tile.

A descriptor holds an address, a shape, strides and the shape of a tile. A tile that hangs over the
edge is filled with zeros. The hardware wants one contiguous dimension and everything else on 16
bytes; a tensor that isn't laid out like that is read through pointers instead.
"""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def can_describe(x: Tensor) -> bool:
    """Whether one of the last two strides is 1, and all else starts on 16 bytes."""
    if 1 not in x.stride()[-2:]:
        return False
    starts = [stride * x.element_size() for stride in x.stride()]
    starts.pop(-1 if x.stride(-1) == 1 else -2)
    return all(start > 0 and start % 16 == 0 for start in starts) and x.data_ptr() % 16 == 0


def is_one_matrix(w: Tensor) -> bool:
    """Whether `w` (E, N, D) can be described as (E · N, D), contiguous in D."""
    follow_each_other = len(w) == 1 or w.stride(0) == w.shape[1] * w.stride(1)
    return follow_each_other and w.stride(2) == 1 and can_describe(w)


def describe_rows(x: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """Descriptor of `x` (S, D) with tiles of `rows` × `columns`; None if it can't be described."""
    if x.stride(1) != 1 or not can_describe(x):
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def describe_weights(
    w: Tensor, rows: int, columns: int, *, halves: bool
) -> TensorDescriptor | None:
    """Descriptor of `w` (E, N, D) whose tiles are `rows` weight rows of an expert × `columns`, or
    None. Its dimensions are those of the memory, (E, N, D) or (E, D, N).

    `halves`: half of the rows are gate rows, the other half their up rows, N / 2 further down. Then
    there are two dimensions of N, (2, N / 2).
    """
    block = [1, rows, columns]
    if halves:
        w, block = w.unflatten(1, (2, -1)), [1, 2, rows // 2, columns]
    if not can_describe(w):
        return None
    if w.stride(-1) != 1:
        w, block = w.movedim(-1, 1), [1, block[-1], *block[1:-1]]
    return TensorDescriptor(w, list(w.shape), list(w.stride()), block)
