"""Activation backward: from the gradient of an expert's activated rows to that of what was
activated, with all else that the same numbers give.

    h = hidden[r], g = grad[r], w the routing weight of row r's slot, 1 if it is on the input:

    d_hidden[r]     = w · g · act'(h)                      for the first projection's gradients
    activated[r]    = w · act(h)                           for the second one's weight gradient
    d_weight[slot]  = <g, act(h)> + <dy[token], bias[e]>   unless the weight is on the input

`grad` comes without the routing weight, as dy[token] · down, so that one product gives both
d_hidden and d_weight. All is computed in fp32 from the stored pre-activation; sums run along a row
in a fixed order. Where a clamp cut off a number, its gradient is 0; on the limit itself it passes,
as in `activation_ref.py`. S rows, I activated columns, H hidden.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.activation_gradient import activate_gated_gradient, activate_gradient
from tmoe.kernels.activation_ref import activate_ref
from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.launch import launch, next_power_of_2, pdl_options
from tmoe.kernels.sort import SortedTokens

BLOCK_R = 8  # rows of a program; row tiles are multiples


@triton.jit
def _load(ptr, rows, columns, stride, mask):
    """[BLOCK_R, columns] in fp32."""
    ptrs = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return widen(tl.load(ptrs, mask=mask, other=0.0)).to(tl.float32)


@triton.jit
def _store(ptr, rows, columns, stride, mask, values):
    ptrs = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(ptrs, narrow(values, ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["top_k", "alpha", "limit"])
def _activation_backward_kernel(
    d_hidden_ptr,  # (S, 2I), or (S, I) if not GATED  written; or None
    activated_ptr,  # (S, I)  written; or None; may be grad's memory
    d_weight_ptr,  # (T·K,)  written for the slots that have a row; or None
    hidden_ptr,  # (S, 2I) or (S, I)
    grad_ptr,  # (S, I), or None if only `activated` is wanted
    row_weight_ptr,  # (T·K,)  routing weight of each slot; None: on the input
    dy_ptr,  # (T, H), or None without bias
    bias_ptr,  # (E, H) of the second projection, or None
    row_to_slot_ptr,  # (S,)
    tiles_ptr,  # (max_tiles, 3)  expert, first row, end row
    num_tiles_ptr,  # (1,)
    I, H, top_k, stride_d_hidden, stride_activated, stride_hidden, stride_grad, stride_dy,
    bias_strides, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (max_tiles · BLOCK_M / BLOCK_R,). A program owns BLOCK_R whole rows of a tile."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    parts: tl.constexpr = BLOCK_M // BLOCK_R
    tile = tl.program_id(0) // parts
    if tile < tl.load(num_tiles_ptr):
        expert = tl.load(tiles_ptr + 3 * tile)
        first_row = tl.load(tiles_ptr + 3 * tile + 1) + (tl.program_id(0) % parts) * BLOCK_R
        end_row = tl.load(tiles_ptr + 3 * tile + 2)
        if first_row < end_row:
            rows = first_row + tl.arange(0, BLOCK_R)
            in_expert = rows < end_row
            slots = tl.load(row_to_slot_ptr + rows, mask=in_expert, other=0)
            weight = tl.full((BLOCK_R, 1), 1.0, tl.float32)
            if row_weight_ptr is not None:
                loaded = tl.load(row_weight_ptr + slots, mask=in_expert, other=0.0)
                weight = widen(loaded).to(tl.float32)[:, None]

            products = tl.zeros((BLOCK_R, BLOCK_I), tl.float32)
            for i in range(0, I, BLOCK_I):
                columns = i + tl.arange(0, BLOCK_I)
                mask = in_expert[:, None] & (columns < I)[None, :]
                grad = tl.zeros((BLOCK_R, BLOCK_I), tl.float32)
                if grad_ptr is not None:
                    grad = _load(grad_ptr, rows, columns, stride_grad, mask)
                if GATED:
                    if INTERLEAVED:
                        both = 2 * i + tl.arange(0, 2 * BLOCK_I)
                        both_mask = in_expert[:, None] & (both < 2 * I)[None, :]
                        hidden = _load(hidden_ptr, rows, both, stride_hidden, both_mask)
                        gate, up = tl.split(hidden.reshape(BLOCK_R, BLOCK_I, 2))
                    else:
                        gate = _load(hidden_ptr, rows, columns, stride_hidden, mask)
                        up = _load(hidden_ptr, rows, columns + I, stride_hidden, mask)
                    y, d_gate, d_up = activate_gated_gradient(
                        gate, up, grad, alpha, limit, ACTIVATION
                    )
                    if d_hidden_ptr is not None:
                        if INTERLEAVED:
                            d_both = tl.join(weight * d_gate, weight * d_up)
                            d_both = d_both.reshape(BLOCK_R, 2 * BLOCK_I)
                            _store(d_hidden_ptr, rows, both, stride_d_hidden, both_mask, d_both)
                        else:
                            _store(
                                d_hidden_ptr, rows, columns, stride_d_hidden, mask, weight * d_gate
                            )
                            _store(
                                d_hidden_ptr, rows, columns + I, stride_d_hidden, mask,
                                weight * d_up,
                            )  # fmt: skip
                else:
                    hidden = _load(hidden_ptr, rows, columns, stride_hidden, mask)
                    y, d_y = activate_gradient(hidden, grad, ACTIVATION)
                    if d_hidden_ptr is not None:
                        _store(d_hidden_ptr, rows, columns, stride_d_hidden, mask, weight * d_y)
                if d_weight_ptr is not None:
                    products += tl.where(mask, grad * y, 0.0)
                if activated_ptr is not None:
                    _store(activated_ptr, rows, columns, stride_activated, mask, weight * y)

            if d_weight_ptr is not None:
                if bias_ptr is not None:
                    bias_ptr += expert.to(tl.int64) * bias_strides[0]
                    for i in range(0, H, BLOCK_I):
                        columns = i + tl.arange(0, BLOCK_I)
                        in_row = columns < H
                        mask = in_expert[:, None] & in_row[None, :]
                        dy = _load(dy_ptr, slots // top_k, columns, stride_dy, mask)
                        bias = tl.load(bias_ptr + columns * bias_strides[1], mask=in_row, other=0.0)
                        products += dy * widen(bias).to(tl.float32)[None, :]
                tl.store(d_weight_ptr + slots, tl.sum(products, 1), mask=in_expert)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def activation_backward(
    hidden: Tensor,
    grad: Tensor | None,
    order: SortedTokens,
    *,
    d_hidden: Tensor | None = None,
    activated: Tensor | None = None,
    d_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    dy: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "swiglu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float = math.inf,
) -> None:
    """Write whichever of `d_hidden`, `activated` and `d_weight` are given.

    hidden: (S, 2I), or (S, I) if not `gated`, what was activated, in expert order. grad: (S, I),
    the gradient of the activated rows without routing weight; None if only `activated` is wanted,
    which may be `grad` itself. row_weight: (T·K,) contiguous; None where the weight is on the
    input. d_weight: (T·K,) fp32 contiguous; slots without a row keep what they hold. dy (T, H) and
    bias (E, H): the second projection's, if it has one. All rows have unit column stride. Rows from
    expert_offsets[E] on are neither read nor written.
    """
    I = hidden.shape[1] // (2 if gated else 1)
    programs = order.tiles.shape[0] * (order.block_m // BLOCK_R)
    if programs == 0:
        return
    block_i = min(256, max(16, next_power_of_2(I)))
    launch(
        _activation_backward_kernel, (programs,),
        d_hidden, activated, d_weight, hidden, grad, row_weight,
        None if bias is None else dy, bias, order.row_to_slot, order.tiles, order.num_tiles,
        I, 0 if bias is None else bias.shape[1], order.top_k,
        *(0 if t is None else t.stride(0) for t in (d_hidden, activated, hidden, grad)),
        0 if bias is None or dy is None else dy.stride(0),
        (0, 0) if bias is None else bias.stride(), alpha, None if limit == math.inf else limit,
        ACTIVATION=activation, GATED=gated, INTERLEAVED=interleaved,
        BLOCK_M=order.block_m, BLOCK_R=BLOCK_R, BLOCK_I=block_i, **pdl_options(hidden.device),
    )  # fmt: skip


def activation_backward_ref(
    hidden: Tensor,
    grad: Tensor,
    *,
    row_weight: Tensor | None = None,
    activation: str = "swiglu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float = math.inf,
) -> tuple[Tensor, Tensor, Tensor]:
    """(d_hidden, activated, <grad, act(hidden)>) by torch's autograd, in the dtype of `hidden`;
    row_weight (S, 1)."""
    hidden = hidden.detach().requires_grad_()
    if gated and interleaved:
        halves = (hidden[:, 0::2], hidden[:, 1::2])
    else:
        halves = hidden.chunk(2, 1) if gated else (hidden,)
    y = activate_ref(*halves, name=activation, alpha=alpha, limit=limit)
    weight = 1.0 if row_weight is None else row_weight
    y.backward(weight * grad)
    assert hidden.grad is not None
    return hidden.grad, weight * y.detach(), (grad * y.detach()).sum(1)
