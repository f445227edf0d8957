"""Route backward: the logits' gradient from that of the weights and that of the probabilities.

Who was selected doesn't change with small changes of the logits, so that the ids are given and the
weights are differentiated as `route.py` computes them, from the last step to the first:

    weight[k] = v[k] · scaling_factor · expert_scale[ids[k]]           d_v
    v[k]      = s[k] / max(Σ s + epsilon, min_sum)                     d_s, where renormalized
    s[k]      = x[ids[k]], sigmoid, softmax over the K, score, …       d_x, at ids[k] or everywhere
    x[e]      = softcap · tanh(logit_scale · logit[e] / softcap)       d_logit
    probs     = softmax over E of logit                                added to d_logit

A logit that is NaN or infinite has gradient 0; so has all of a row without a finite one. All is
fp32, and a row's sums run in a fixed order. T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.elementary import exp, sigmoid, softplus, tanh
from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options
from tmoe.kernels.route_ref import route_ref, softmax_ref
from tmoe.kernels.select import LARGEST


@triton.jit
def _row_sum(values):
    return tl.sum(values, axis=1, keep_dims=True)


@triton.jit
def _softmax(x, exists):
    """Over the columns that exist."""
    x = tl.where(exists, x, -LARGEST)
    e = tl.where(exists, exp(x - tl.max(x, axis=1, keep_dims=True)), 0.0)
    return tl.div_rn(e, _row_sum(e))


@triton.jit
def _finite(x):
    """As in `route.py`."""
    x = tl.where(x == x, x, -LARGEST)
    return tl.where(x < -LARGEST, -LARGEST, tl.where(x > LARGEST, LARGEST, x))


@triton.jit
def _prepared(logit, LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """(x, its derivative), all finite; -LARGEST is an expert that gets no weight."""
    x = _finite(logit)
    alive = x > -LARGEST
    slope = tl.where(tl.abs(logit) <= LARGEST, 1.0, 0.0)
    if LOGIT_SCALE != 1.0:
        scaled = x * LOGIT_SCALE
        slope *= tl.where(tl.abs(scaled) <= LARGEST, LOGIT_SCALE, 0.0)
        x = tl.where(alive, _finite(scaled), x)
    if SOFTCAP != 0.0:
        t = tanh(tl.div_rn(x, SOFTCAP))
        slope *= 1.0 - t * t
        x = tl.where(alive, SOFTCAP * t, x)
    return x, tl.where(alive, slope, 0.0)


@triton.jit
def _one_score(x, SCORE: tl.constexpr):
    """(score, its derivative) of one that depends on its own logit only."""
    if SCORE == "sigmoid":
        s = sigmoid(x)
        return s, s * (1.0 - s)
    elif SCORE == "sqrtsoftplus":
        s = tl.sqrt_rn(softplus(x))
        return s, tl.where(s > 0.0, sigmoid(x) / (2.0 * tl.where(s > 0.0, s, 1.0)), 0.0)
    else:
        tl.static_assert(SCORE == "logit", "unknown score")
        return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _of_slot(values, slot, k):
    """[BLOCK_T, 1]: column k of `values` [BLOCK_T, BLOCK_K]."""
    return tl.sum(tl.where(slot == k, values, tl.zeros_like(values)), axis=1, keep_dims=True)


@triton.jit
def _sparsemixer(
    x, ids, d_s, exists, column, slot, K: tl.constexpr, JITTER: tl.constexpr, BLOCK_K: tl.constexpr
):
    """(the weights, d_x): each a softmax over those that were left and near."""
    weights = tl.zeros(ids.shape, tl.float32)
    d_x = tl.zeros(x.shape, tl.float32)
    left = exists
    for k in range(K):
        taken = column == _of_slot(ids, slot, k)
        best = _row_sum(tl.where(taken, x, 0.0))
        distance = tl.div_rn(best - x, tl.maximum(tl.abs(x), best))
        near = left & ~(distance > 2.0 * JITTER)  # NaN, from 0 / 0, is near
        p = _softmax(x, near)
        weight = _row_sum(tl.where(taken, p, 0.0))
        weights = tl.where(slot == k, weight, weights)
        d_x += _of_slot(d_s, slot, k) * weight * (tl.where(taken, 1.0, 0.0) - p)
        left = left & ~taken
    return weights, d_x


@triton.jit(
    do_not_specialize=[
        "T", "stride_t", "stride_e", "stride_scale", "stride_it", "stride_ik", "stride_wt",
        "stride_wk", "stride_pt", "stride_pe",
    ]
)  # fmt: skip
def _route_backward_kernel(
    d_logits_ptr,  # (T, E + NUM_SHARED), written
    d_weights_ptr,  # (T, K + NUM_SHARED), or None
    d_probs_ptr,  # (T, E), or None
    logits_ptr,  # (T, E + NUM_SHARED)
    ids_ptr,  # (T, K): those that were selected, without the shared ones
    expert_scale_ptr,  # (E,) or None
    T, stride_t, stride_e, stride_scale, stride_it, stride_ik, stride_wt, stride_wk, stride_pt,
    stride_pe, scaling_factor, epsilon, min_sum,
    E: tl.constexpr, K: tl.constexpr, NUM_SHARED: tl.constexpr,
    SCORE: tl.constexpr, WEIGHT: tl.constexpr, RENORMALIZE: tl.constexpr,
    LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, JITTER: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(T, BLOCK_T),)."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    column = tl.arange(0, BLOCK_E)[None, :]
    slot = tl.arange(0, BLOCK_K)[None, :]
    in_row = (row < T) & (column < E + NUM_SHARED)
    row_ptr = logits_ptr + row * stride_t
    ptrs = row_ptr + column.to(tl.int64) * stride_e
    logit = widen(tl.load(ptrs, mask=in_row, other=float("-inf"))).to(tl.float32)
    is_expert = in_row & (column < E)
    finite = (tl.abs(logit) <= LARGEST) & is_expert
    any_finite = tl.max(finite.to(tl.int32), axis=1, keep_dims=True) > 0
    d_logit = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if d_probs_ptr is not None:
        ptrs = d_probs_ptr + row * stride_pt + column.to(tl.int64) * stride_pe
        d_p = widen(tl.load(ptrs, mask=is_expert, other=0.0)).to(tl.float32)
        p = _softmax(_finite(logit), column < E)
        d_logit += p * (d_p - _row_sum(p * d_p))

    if d_weights_ptr is not None:
        x, slope = _prepared(logit, LOGIT_SCALE, SOFTCAP)
        in_slots = (row < T) & (slot < K)
        ids_ptrs = ids_ptr + row * stride_it + slot.to(tl.int64) * stride_ik
        given = tl.load(ids_ptrs, mask=in_slots, other=-1)
        ids = tl.where((given >= 0) & (given < E), given, -1).to(tl.int32)
        if NUM_SHARED > 0:
            ids = tl.where(slot < K, ids, tl.where(slot < K + NUM_SHARED, E + slot - K, -1))
        has_id = ids >= 0
        # The logits are still in the L1 cache.
        ptrs = row_ptr + ids.to(tl.int64) * stride_e
        picked = widen(tl.load(ptrs, mask=has_id, other=float("-inf"))).to(tl.float32)
        picked, _slope = _prepared(picked, LOGIT_SCALE, SOFTCAP)
        weighs = any_finite & has_id & (picked > -LARGEST)
        ptrs = d_weights_ptr + row * stride_wt + slot.to(tl.int64) * stride_wk
        d_v = widen(tl.load(ptrs, mask=weighs, other=0.0)).to(tl.float32) * scaling_factor
        if expert_scale_ptr is not None:
            scale_ptrs = expert_scale_ptr + ids.to(tl.int64) * stride_scale
            scale = tl.load(scale_ptrs, mask=has_id & (ids < E), other=1.0)
            d_v *= widen(scale).to(tl.float32)

        d_x = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
        if WEIGHT == "sparsemixer":
            s, _nothing = _sparsemixer(x, ids, d_v, is_expert, column, slot, K, JITTER, BLOCK_K)
        elif WEIGHT == "softmax":
            s = _softmax(picked, has_id)
        elif WEIGHT == "sigmoid":
            s, s_slope = _one_score(picked, "sigmoid")
        elif SCORE == "softmax":
            p = _softmax(x, column < E)
            s = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
            for k in range(K):
                here = column == _of_slot(ids, slot, k)
                s = tl.where(slot == k, _row_sum(tl.where(here, p, 0.0)), s)
        else:
            s, s_slope = _one_score(picked, SCORE)
        d_s = d_v
        if RENORMALIZE:
            # A number that is subnormal in fp32 comes as fp64.
            least = tl.full((1, 1), min_sum, tl.float32)
            sum_s = _row_sum(tl.where(has_id, s, 0.0)) + tl.full((1, 1), epsilon, tl.float32)
            divisor = tl.maximum(sum_s, least)
            shared_part = _row_sum(tl.where(weighs, d_v * tl.div_rn(s, divisor), 0.0))
            shared_part = tl.where(sum_s >= least, shared_part, 0.0)
            d_s = tl.where(has_id, tl.div_rn(d_v - shared_part, divisor), 0.0)

        if WEIGHT == "sparsemixer":
            _s, d_x = _sparsemixer(x, ids, d_s, is_expert, column, slot, K, JITTER, BLOCK_K)
        else:
            at_slot = d_s  # what goes to the logit that was picked
            if WEIGHT == "softmax":
                at_slot = s * (d_s - _row_sum(s * d_s))
            elif WEIGHT == "score" and SCORE == "softmax":
                d_x = -p * _row_sum(tl.where(has_id, s * d_s, 0.0))
                at_slot = s * d_s
            else:
                at_slot = d_s * s_slope
            for k in range(K + NUM_SHARED):
                here = column == _of_slot(ids, slot, k)
                d_x += tl.where(here, _of_slot(at_slot, slot, k), 0.0)
        d_logit += d_x * slope
    d_logit = tl.where(tl.abs(logit) <= LARGEST, d_logit, 0.0)
    ptrs = d_logits_ptr + row * (E + NUM_SHARED) + column
    tl.store(ptrs, narrow(d_logit, d_logits_ptr.dtype.element_ty), mask=in_row)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def route_backward(
    d_weights: Tensor | None,
    d_probs: Tensor | None,
    logits: Tensor,
    topk_ids: Tensor,
    *,
    top_k: int,
    score: str = "logit",
    weight: str = "score",
    renormalize: bool = False,
    expert_scale: Tensor | None = None,
    num_shared: int = 0,
    logit_scale: float = 1.0,
    logit_softcap: float = 0.0,
    jitter: float = 0.0,
    scaling_factor: float = 1.0,
    epsilon: float = 0.0,
    min_sum: float = 0.0,
    **selection: Any,
) -> Tensor:
    """The gradient (T, E) of `logits` (T, E), in their dtype; any strides.

    `d_weights` (T, K) and `d_probs` (T, E) are of any float dtype; None counts as 0. `topk_ids`
    (T, K) are those of the forward; what was selected by doesn't matter, so that `route`'s other
    keywords are taken and left unread. With `num_shared`, S, it is (T, E + S) and d_weights
    (T, K + S).
    """
    T, columns = logits.shape
    out = logits.new_empty(T, columns)
    if T == 0:
        return out
    block_e = max(16, next_power_of_2(columns))
    block_t = max(1, 512 // block_e)
    none = (0, 0)
    launch(
        _route_backward_kernel, (cdiv(T, block_t),),
        out, d_weights, d_probs, logits, topk_ids, expert_scale,
        T, *logits.stride(), 0 if expert_scale is None else expert_scale.stride(0),
        *topk_ids.stride(), *(none if d_weights is None else d_weights.stride()),
        *(none if d_probs is None else d_probs.stride()), scaling_factor, epsilon, min_sum,
        E=columns - num_shared, K=top_k, NUM_SHARED=num_shared,
        SCORE=score, WEIGHT=weight, RENORMALIZE=renormalize,
        LOGIT_SCALE=logit_scale, SOFTCAP=logit_softcap, JITTER=jitter,
        BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_K=max(2, next_power_of_2(top_k + num_shared)),
        num_warps=1 if block_e <= 512 else 4, **pdl_options(logits.device),
        enable_fp_fusion=False,  # d_v is a product, and d_v - d_v isn't 0 where one is rounded
    )  # fmt: skip
    return out


def route_backward_ref(
    d_weights: Tensor | None,
    d_probs: Tensor | None,
    logits: Tensor,
    topk_ids: Tensor,
    **recipe: Any,
) -> Tensor:
    """The same by torch's autograd, in the dtype of `logits`."""
    x = logits.detach().requires_grad_()
    total = x.sum() * 0.0
    with torch.enable_grad():
        if d_weights is not None:
            weights, _ = route_ref(x, topk_ids=topk_ids, **recipe)
            total = total + (weights * d_weights).sum()
        if d_probs is not None:
            probs = softmax_ref(x[:, : x.shape[1] - recipe.get("num_shared", 0)])
            total = total + (probs * d_probs).sum()
    return torch.autograd.grad(total, x)[0]
