"""Rows sorted by expert, moved apart: FlashInfer's grouped GEMMs want groups to begin at multiples.

A group's rows are a multiple of 4, and in the swizzled scales it begins at a multiple of 128. How
many rows an expert has is known on the device only, so everything here has a size that holds the
worst case, and rows between groups repeat a neighbour's: what becomes of them is never read.

S rows, E experts; `offsets` and `starts` (E + 1,) int32 say where groups begin, and where they end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_ROWS, SCALE_ROWS = 4, 128


def padded_starts(offsets: Tensor) -> Tensor:
    """Where groups begin when each is filled up to a multiple of 4 rows."""
    counts = offsets.diff()
    return F.pad(_up(counts, GROUP_ROWS).cumsum(0, dtype=torch.int32), (1, 0))


def padded_size(num_rows: int, num_experts: int) -> int:
    """Rows that certainly hold all groups after that."""
    return _up(num_rows + (GROUP_ROWS - 1) * min(num_rows, num_experts), GROUP_ROWS)


def scale_starts(starts: Tensor) -> Tensor:
    """Where the kernel looks for each group's swizzled scales, by its own formula."""
    before = torch.arange(len(starts), device=starts.device, dtype=torch.int32)
    return (starts + before * (SCALE_ROWS - 1)) // SCALE_ROWS * SCALE_ROWS


def scale_size(size: int, num_experts: int) -> int:
    """Rows of scales for `size` rows, the last group's tile included."""
    return _up(size + num_experts * (SCALE_ROWS - 1), SCALE_ROWS)


def place_of(rows: Tensor, groups: Tensor, elsewhere: Tensor, size: int) -> Tensor:
    """Which row of the layout `elsewhere`, of `size` rows, each of `rows` of `groups` is.

    Rows of no group come out as some row of `elsewhere`.
    """
    expert = torch.searchsorted(groups[1:-1], rows, right=True)
    return (elsewhere[expert] + rows - groups[expert]).clamp(max=size - 1)


def numbered(size: int, like: Tensor) -> Tensor:
    """(size,) int32: 0, 1, 2, ..."""
    return torch.arange(size, device=like.device, dtype=torch.int32)


def _up(number, multiple: int):  # type: ignore[no-untyped-def]  # of a tensor, or of an int
    return (number + multiple - 1) // multiple * multiple
