"""Push: write rows into the memory of the ranks that they are for, over NVLink.

    for q-th of the other ranks, p its number, and i < C:
        there[p][start + index(own, p) · C + i] = rows[q · C + i]
            every word of a used row; of another one the words from `tail` on

Each rank has one buffer, which all ranks of the group can write: `peers` holds their addresses. In
it rows from the other ranks stand one rank after the other, C of each, from row `start` on:
index(own, p) is own's place among the ranks other than p. A row is used if one of its slots isn't
-1. Nobody else writes there, so ranks need no word with each other but a barrier afterwards.
C rows for each rank, W words of a row, K slots of a row, P ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options


@triton.jit(do_not_specialize=["own", "capacity", "start", "tail"])
def _push_kernel(
    peers_ptr,  # (P,) int64: addresses of (rows, W) words  written
    rows_ptr,  # ((P - 1) · C, W) words
    slots_ptr,  # ((P - 1) · C, K) int32
    W, K, own, capacity, start, tail, stride_there, stride_rows, stride_slots,
    ALIGNED: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: ((P - 1) · C, cdiv(W, BLOCK_W)). Program (row, j) copies words j of one row. ALIGNED:
    words of 16 bytes, in which `tail` counts."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    row, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    other = row // capacity
    p = tl.where(other >= own, other + 1, other)
    to = start + tl.where(p < own, own - 1, own) * capacity + row % capacity
    k, words = tl.arange(0, BLOCK_K), j * BLOCK_W + tl.arange(0, BLOCK_W)
    slots = tl.load(slots_ptr + row * stride_slots + k, mask=k < K, other=-1)
    goes = (words < W) & ((tl.max(slots, 0) >= 0) | (words >= tail * ALIGNED))
    x = tl.load(rows_ptr + row * stride_rows + words, mask=goes, other=0)
    address = tl.multiple_of(tl.load(peers_ptr + p), 16)
    there = tl.multiple_of(address.to(tl.pointer_type(rows_ptr.dtype.element_ty)), 16)
    tl.store(there + to * stride_there + words, x, mask=goes)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def push(
    peers: Tensor, rows: Tensor, slots: Tensor, *, own: int, capacity: int, start: int = 0,
    row_bytes: int, tail: int | None = None,
) -> None:  # fmt: skip
    """peers (P,) int64, addresses that are multiples of 16; rows ((P - 1) · C, W), dense columns;
    slots ((P - 1) · C, K) int32. `start`: rows in front of those that come; `row_bytes`: of a row
    there; `tail`: the first byte, a multiple of 16, that goes from rows without a slot too; None:
    no byte does."""
    if rows.numel() == 0:
        return
    size = rows.shape[1] * rows.itemsize
    places = (size, row_bytes, rows.stride(0) * rows.itemsize, rows.data_ptr())
    word = torch.int32 if all(place % 4 == 0 for place in places) else torch.int16
    words, K = rows.view(word), slots.shape[1]
    W = words.shape[1]
    block_w = min(1024, max(16, next_power_of_2(W)))
    launch(
        _push_kernel, (rows.shape[0], cdiv(W, block_w)),
        peers, words, slots, W, K, own, capacity, start,
        cdiv(size if tail is None else tail, 16),
        row_bytes // word.itemsize, words.stride(0), slots.stride(0),
        ALIGNED=16 // word.itemsize, BLOCK_W=block_w, BLOCK_K=next_power_of_2(K),
        **pdl_options(rows.device),
    )  # fmt: skip
