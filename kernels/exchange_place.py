"""Place: which row of which rank's message each token becomes.

    slots[t, k] = the slot of expert ids[t, k], -1 if there is none; of an expert with n copies
                  copy ((first_turn + t + e(e + 1)/2) · φ mod 2^32) · n / 2^32
    goes[t, p]  = some slots[t, k] is rank p's, within [first[p], first[p + 1])
    rows[t, p]  = start[p] + number of t' < t with goes[t', p]; -1 if it doesn't go, or doesn't fit
    counts[p]   = number of t with goes[t, p]

A token goes to a rank once, however many of its experts are there. With a capacity C each rank has
C rows: start is 0, C, 2C, ... for the other ranks, and then comes the own one, whose rows needn't
be sent. Without one start is 0: where each begins is known once all have been counted.
T tokens, K experts per token, P ranks, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.exchange_ref import PHI, Places, Slots
from tmoe.kernels.launch import launch, next_power_of_2, pdl_options

MOST_IDS = 8192  # that a program looks at, at once
_PHI = tl.constexpr(PHI)


@triton.jit(do_not_specialize=["T", "num_experts", "first_turn", "own", "capacity"])
def _place_kernel(
    slots_ptr,  # (T, K) int32  written
    rows_ptr,  # (T, P) int32  written
    counts_ptr,  # (P,) int32  written
    dropped_ptr,  # (1,) int64  what doesn't fit is added; or None
    ids_ptr,  # (T, K)
    first_ptr,  # (P + 1,) int32
    of_experts_ptr,  # (E, R) int32; None: slots are the experts
    copies_ptr,  # (E,) int32, or None
    T, K, P, R, num_experts, first_turn, own, capacity, stride_t, stride_k,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (P,). Program p walks over all tokens."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    p = tl.program_id(0)
    first, end = tl.load(first_ptr + p), tl.load(first_ptr + p + 1)
    start = tl.where(p == own, tl.num_programs(0) - 1, p - (p > own).to(tl.int32)) * capacity
    k = tl.arange(0, BLOCK_K)[None, :]
    count = tl.full((), 0, tl.int32)
    for begin in range(0, T, BLOCK_T):
        t = begin + tl.arange(0, BLOCK_T)
        inside = (t < T)[:, None] & (k < K)
        at = t.to(tl.int64)[:, None]
        ids = tl.load(ids_ptr + at * stride_t + k * stride_k, mask=inside, other=-1)
        known = (ids >= 0) & (ids < num_experts)
        if of_experts_ptr is not None:
            e = tl.where(known, ids, 0).to(tl.int64)
            turn = first_turn + at + e * (e + 1) // 2
            n = tl.load(copies_ptr + e, mask=known, other=1).to(tl.int64)
            copy = ((turn * _PHI & 0xFFFFFFFF) * n) >> 32
            slots = tl.load(of_experts_ptr + e * R + copy, mask=known, other=-1)
        else:
            slots = tl.where(known, ids, -1).to(tl.int32)
        if p == 0:
            tl.store(slots_ptr + at * K + k, slots, mask=inside)
        goes = tl.max(((slots >= first) & (slots < end)).to(tl.int32), 1)
        place = count + tl.cumsum(goes, 0) - goes
        fits = (goes > 0) & ((capacity == 0) | (place < capacity))
        row = tl.where(fits, start + place, -1)
        tl.store(rows_ptr + t.to(tl.int64) * P + p, row, mask=t < T)
        count += tl.sum(goes, 0)
    tl.store(counts_ptr + p, count)
    if dropped_ptr is not None:
        if count > capacity:
            tl.atomic_add(dropped_ptr, (count - capacity).to(tl.int64))
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def place(
    topk_ids: Tensor,
    slots: Slots,
    *,
    first_turn: int = 0,
    own: int = 0,
    capacity: int = 0,
    dropped: Tensor | None = None,
) -> Places:
    """topk_ids (T, K), any integer dtype and strides -> where its tokens go.

    `own`: this rank; `capacity`: rows of each rank, 0: all that come; `dropped` (1,) int64: the
    number of those that find no room is added to it. No host sync.
    """
    (T, K), P = topk_ids.shape, slots.first.numel() - 1
    of_tokens, rows, counts = (slots.first.new_empty(size) for size in ((T, K), (T, P), (P,)))
    block_k = next_power_of_2(K)
    block_t = min(max(16, next_power_of_2(max(T, 1))), max(16, MOST_IDS // block_k))
    launch(
        _place_kernel, (P,),
        of_tokens, rows, counts, dropped, topk_ids, slots.first, slots.of_experts, slots.copies,
        T, K, P, 1 if slots.of_experts is None else slots.of_experts.shape[1],
        slots.num_experts, first_turn, own, capacity, *topk_ids.stride(),
        BLOCK_T=block_t, BLOCK_K=block_k, num_warps=16 if block_t * block_k > 4096 else 4,
        **pdl_options(topk_ids.device),
    )  # fmt: skip
    return Places(of_tokens, rows, counts)
