"""Tensor descriptors: what the tensor memory accelerator has to know to copy a tile.

A descriptor holds an address, a shape, strides and the shape of a tile. A tile that hangs over the
edge is filled with zeros. The hardware wants one contiguous dimension and everything else on 16
bytes; a tensor that isn't laid out like that is read through pointers instead.
"""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tmoe.kernels.tiles import Tile


def can_describe(x: Tensor) -> bool:
    """Whether one of the last two strides is 1, and all else starts on 16 bytes."""
    if 1 not in x.stride()[-2:]:
        return False
    starts = [stride * x.element_size() for stride in x.stride()]
    starts.pop(-1 if x.stride(-1) == 1 else -2)
    return all(start > 0 and start % 16 == 0 for start in starts) and x.data_ptr() % 16 == 0


def describe_rows(x: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """Descriptor of `x` (S, D) with tiles of `rows` × `columns`; None if it can't be described."""
    if x.stride(1) != 1 or not can_describe(x):
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def describe_weights(
    w: Tensor, tile: Tile, *, gated: bool, interleaved: bool
) -> TensorDescriptor | None:
    """Descriptor of `w` (E, N, D) whose tiles are the weight rows of one output tile, or None.

    Its dimensions are those of the memory, (E, N, D) or (E, D, N). Concatenated gate and up halves
    make two dimensions of N, (2, N/2), so that one tile takes the same columns of both.
    """
    block = [1, tile.block_n * (2 if gated else 1), tile.block_d]
    if gated and not interleaved:
        w, block = w.unflatten(1, (2, -1)), [1, 2, tile.block_n, tile.block_d]
    if not can_describe(w):
        return None
    if w.stride(-1) != 1:
        w, block = w.movedim(-1, 1), [1, block[-1], *block[1:-1]]
    return TensorDescriptor(w, list(w.shape), list(w.stride()), block)
