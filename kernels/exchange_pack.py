"""Pack: write each token into the message of every rank that it goes to.

    for p with r = rows[t, p] >= 0:   message[r] = x[t], scale[t], weights[t],
                                                   slots[t] - first[p], -1 for those of other ranks

A message has first the rows for other ranks, num_sent of them, then `gap` rows that will come from
there, and then the rows that stay, so that with those that come they are one tensor. Where each
rank has `capacity` rows and fewer are used, the others have the slots -1 and the weights 0; what
else is in them isn't written. A token is read once. T tokens, K experts per token, P ranks,
W and C words of a token and of its scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.exchange_ref import Parts, Places
from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options


@triton.jit(do_not_specialize=["T", "own", "capacity", "num_sent", "gap"])
def _pack_kernel(
    to_x_ptr, to_scale_ptr,  # (N, W) and (N, C) or None  written
    to_slots_ptr, to_weights_ptr,  # (N, K)  written
    x_ptr, scale_ptr,  # (T, W) and (T, C) or None
    slots_ptr,  # (T, K) int32
    weights_ptr,  # (T, K)
    rows_ptr,  # (T, P) int32
    counts_ptr,  # (P,) int32
    first_ptr,  # (P + 1,) int32
    T, W, C, K, P, own, capacity, num_sent, gap,
    stride_to_x, stride_to_scale, stride_to_slots, stride_to_weights,
    stride_x, stride_scale, stride_weights,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (max(T, capacity), cdiv(W, BLOCK_W)). Program (i, j) copies words j of token i; those
    with j = 0 copy the rest, and write the i-th row of every rank if no token stands there."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    i, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    words, c, k = j * BLOCK_W + tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    is_token = i < T
    x = tl.load(x_ptr + i * stride_x + words, mask=is_token & (words < W), other=0)
    slots = tl.load(slots_ptr + i * K + k, mask=is_token & (k < K), other=-1)
    weights = tl.load(weights_ptr + i * stride_weights + k, mask=is_token & (k < K), other=0.0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + i * stride_scale + c, mask=is_token & (c < C), other=0)
    for p in range(P):
        row = tl.load(rows_ptr + i * P + p, mask=is_token, other=-1).to(tl.int64)
        goes = row >= 0
        row = tl.where(row < num_sent, row, row + gap)
        tl.store(to_x_ptr + row * stride_to_x + words, x, mask=goes & (words < W))
        if j == 0:
            start = tl.where(p == own, P - 1, p - (p > own).to(tl.int32)).to(tl.int64) * capacity
            start = tl.where(p == own, start + gap, start)
            unused = (i < capacity) & (i >= tl.load(counts_ptr + p))
            if scale_ptr is not None:
                to = to_scale_ptr + row * stride_to_scale + c
                tl.store(to, scale, mask=goes & (c < C))
            begin, end = tl.load(first_ptr + p), tl.load(first_ptr + p + 1)
            local = tl.where((slots >= begin) & (slots < end), slots - begin, -1)
            write = goes & (k < K)
            tl.store(to_slots_ptr + row * stride_to_slots + k, local, mask=write)
            tl.store(to_weights_ptr + row * stride_to_weights + k, weights, mask=write)
            row, write = start + i, unused & (k < K)
            none = tl.full((BLOCK_K,), -1, tl.int32)
            tl.store(to_slots_ptr + row * stride_to_slots + k, none, mask=write)
            nothing = tl.zeros((BLOCK_K,), to_weights_ptr.dtype.element_ty)
            tl.store(to_weights_ptr + row * stride_to_weights + k, nothing, mask=write)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def pack(
    message: Parts,
    tokens: Parts,
    places: Places,
    first: Tensor,
    *,
    own: int = 0,
    capacity: int = 0,
    num_sent: int,
    gap: int,
) -> None:
    """Write `tokens`, whose columns are dense, into `message`; both have parts of the same widths
    and dtypes. `own`, `capacity`: as `exchange_place.place` was given them."""
    (T, P), K = places.rows.shape, tokens.slots.shape[1]
    to_x, x = _words(message.x, tokens.x)
    to_scale, scale = None, None
    if message.scale is not None and tokens.scale is not None:
        to_scale, scale = _words(message.scale, tokens.scale)
    C = 0 if scale is None else scale.shape[1]
    block_w = min(1024, max(16, next_power_of_2(x.shape[1])))
    programs = max(T, capacity)
    if programs == 0:
        return
    launch(
        _pack_kernel, (programs, cdiv(x.shape[1], block_w)),
        to_x, to_scale, message.slots, message.weights, x, scale, tokens.slots, tokens.weights,
        places.rows, places.counts, first,
        T, x.shape[1], C, K, P, own, capacity, num_sent, gap,
        to_x.stride(0), 0 if to_scale is None else to_scale.stride(0), message.slots.stride(0),
        message.weights.stride(0), x.stride(0), 0 if scale is None else scale.stride(0),
        tokens.weights.stride(0),
        BLOCK_W=block_w, BLOCK_C=next_power_of_2(max(C, 1)), BLOCK_K=next_power_of_2(K),
        **pdl_options(x.device),
    )  # fmt: skip


def _words(out: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Both as the largest integers that rows consist of."""
    size = part.element_size()
    for word in (torch.int32, torch.int16, torch.int8):
        each = word.itemsize // size if word.itemsize >= size else 0
        if each and all(
            t.shape[1] % each == 0 and t.stride(0) % each == 0 and t.storage_offset() % each == 0
            for t in (out, part)
        ):
            return out.view(word), part.view(word)
    return out, part  # float64
