"""Route: each token's K experts and their weights, from the router's logits.

    x[e]      = softcap · tanh(logit_scale · logit[e] / softcap)           where a model has them
    score[e]  = x[e], softmax over E, sigmoid, or sqrt(softplus)           fp32
    choice[e] = score[e] + bias[e]                        decides, never enters a weight
    groups    : the E experts are n_group equal blocks; only the topk_group best of them compete.
                A block's score is the sum of its two best choices, or its best choice
    ids       = the K largest choices, in descending order; the lower index wins a tie
    s[k]      = score[ids[k]], sigmoid(x[ids[k]]), softmax over the K of x[ids[k]], or SparseMixer's
                1 / Σ exp(x[e] - x[ids[k]]) over the e still left and near ids[k]
    weight[k] = s[k] / max(Σ s + epsilon, min_sum)        where the method renormalizes
                · scaling_factor · expert_scale[ids[k]]

A NaN logit counts as -inf. An expert whose logit is -inf may fill a slot, and then weighs 0; in a
row without a finite logit all weights are 0. T tokens, E experts, K experts per token.

With ids given (routing replay, hash routing) nothing is selected; the weights are those of the ids.
Shared experts that the router weighs (Inkling) have their logits behind the E others; they are
always selected and take part in the sum. `tmoe/routing/families.py` says which model does what.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.elementary import exp, sigmoid, softplus, tanh
from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options
from tmoe.kernels.route_ref import route_ref  # noqa: F401  (in torch; usable without Triton)
from tmoe.kernels.select import LARGEST, select

MANY_ROWS = 2048  # from here on a program routes several


@triton.jit
def _finite(x):
    """NaN and -inf become the lowest finite number, +inf the largest: no inf - inf after this."""
    x = tl.where(x == x, x, -LARGEST)
    return tl.where(x < -LARGEST, -LARGEST, tl.where(x > LARGEST, LARGEST, x))


@triton.jit
def _load_logits(ptrs, stride_part, mask, NUM_PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Logits in fp32; of parts, their sum as DTYPE holds it."""
    logit = widen(tl.load(ptrs, mask=mask, other=float("-inf"))).to(tl.float32)
    if NUM_PARTS > 0:
        for part in tl.static_range(1, NUM_PARTS):
            logit += tl.load(ptrs + part * stride_part.to(tl.int64), mask=mask, other=0.0)
        logit = widen(narrow(logit, DTYPE)).to(tl.float32)
    return logit


@triton.jit
def _prepare(logit, LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Logits as the scores take them, all finite; -LARGEST is an expert that gets no weight."""
    x = _finite(logit)
    alive = x > -LARGEST
    if LOGIT_SCALE != 1.0:
        x = tl.where(alive, _finite(x * LOGIT_SCALE), x)
    if SOFTCAP != 0.0:
        x = tl.where(alive, SOFTCAP * tanh(tl.div_rn(x, SOFTCAP)), x)
    return x


@triton.jit
def _score(x, top, total, SCORE: tl.constexpr):
    """Scores of logits x; `top` and `total` are the row's maximum and sum of exp(x - top)."""
    if SCORE == "softmax":
        return tl.div_rn(exp(x - top), total)
    elif SCORE == "sigmoid":
        return sigmoid(x)
    elif SCORE == "sqrtsoftplus":
        return tl.sqrt_rn(softplus(x))
    else:
        tl.static_assert(SCORE == "logit", "unknown score")
        return x


@triton.jit
def _top_and_total(x, exists):
    """A row's maximum and its sum of exp(x - maximum)."""
    top = tl.max(x, axis=1, keep_dims=True)
    return top, tl.sum(tl.where(exists, exp(x - top), 0.0), axis=1, keep_dims=True)


@triton.jit
def _weigh(s, real, epsilon, min_sum, WEIGHT: tl.constexpr, RENORMALIZE: tl.constexpr):
    """Weights of the selected, before they are scaled; `s` is their logit, score or weight."""
    if WEIGHT == "sigmoid":
        s = sigmoid(s)
    elif WEIGHT == "softmax":
        s = tl.where(real, s, -LARGEST)
        s = tl.where(real, exp(s - tl.max(s, axis=1, keep_dims=True)), 0.0)
        s = tl.div_rn(s, tl.sum(s, axis=1, keep_dims=True))
    else:
        tl.static_assert(WEIGHT == "score" or WEIGHT == "sparsemixer", "unknown weight")
    if RENORMALIZE:
        total = tl.sum(tl.where(real, s, 0.0), axis=1, keep_dims=True)
        s = tl.div_rn(s, tl.maximum(total + epsilon, min_sum))
    return s


@triton.jit(
    do_not_specialize=[
        "T", "stride_part", "stride_t", "stride_e", "stride_bias", "stride_scale",
        "stride_it", "stride_ik",
    ]
)  # fmt: skip
def _route_kernel(
    weights_ptr,  # (T, K + NUM_SHARED) fp32, fp16 or bf16, written
    ids_ptr,  # (T, K + NUM_SHARED) int32 or int64, written
    probs_ptr,  # (T, E) fp32, written: softmax of the logits over E; or None
    expert_counts_ptr,  # (E,) int32, added to: how many slots each expert got; or None
    sums_ptr,  # (T, E) written where the logits come in parts; otherwise anything
    logits_ptr,  # (T, E + NUM_SHARED); or (NUM_PARTS, T, E) fp32, to be added up
    bias_ptr,  # (E,) or None
    expert_scale_ptr,  # (E,) or None
    given_ids_ptr,  # (T, K) integers or None
    T, stride_part, stride_t, stride_e, stride_bias, stride_scale, stride_it, stride_ik,
    scaling_factor, epsilon, min_sum,
    E: tl.constexpr, K: tl.constexpr, NUM_SHARED: tl.constexpr,
    SCORE: tl.constexpr, WEIGHT: tl.constexpr, RENORMALIZE: tl.constexpr,
    LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, JITTER: tl.constexpr,
    N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, GROUP_SCORE: tl.constexpr,
    RULED_OUT: tl.constexpr,
    NUM_PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(T, BLOCK_T),).

    T and the strides are not specialised, and a row is spread over the same lanes whatever BLOCK_T
    is. So one order of every sum serves all batches: a row has the same bits in any of them.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    GROUP_SIZE: tl.constexpr = E // N_GROUP
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    column = tl.arange(0, BLOCK_S * BLOCK_G)[None, :]
    group, member = column % BLOCK_G, column // BLOCK_G  # neighbours: different groups
    expert = group * GROUP_SIZE + member
    exists = (group < N_GROUP) & (member < GROUP_SIZE)
    slot = tl.arange(0, BLOCK_K)[None, :]
    row_ptr = logits_ptr + row * stride_t
    ptrs = row_ptr + expert.to(tl.int64) * stride_e
    is_real = (row < T) & exists
    logit = _load_logits(ptrs, stride_part, is_real, NUM_PARTS, sums_ptr.dtype.element_ty)
    if NUM_PARTS > 0:
        sums = narrow(logit, sums_ptr.dtype.element_ty)
        tl.store(sums_ptr + row * E + expert, sums, mask=is_real)
    any_finite = tl.max((tl.abs(logit) <= LARGEST).to(tl.int32), axis=1, keep_dims=True) > 0
    x = _prepare(logit, LOGIT_SCALE, SOFTCAP)

    top, total = 0.0, 1.0
    if SCORE == "softmax":
        top, total = _top_and_total(x, exists)
    if probs_ptr is not None:
        raw = _finite(logit)
        raw_top, raw_total = _top_and_total(raw, exists)
        ptrs = probs_ptr + row * E + expert
        tl.store(ptrs, _score(raw, raw_top, raw_total, "softmax"), mask=is_real)

    if given_ids_ptr is not None:
        ptrs = given_ids_ptr + row * stride_it + slot.to(tl.int64) * stride_ik
        given = tl.load(ptrs, mask=(row < T) & (slot < K), other=-1)
        ids = tl.where((given >= 0) & (given < E), given, -1).to(tl.int32)
    else:
        choice = _score(x, top, total, SCORE)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * stride_bias, mask=exists, other=0.0)
            choice = _finite(choice + widen(bias).to(tl.float32))
        ids, values = select(
            x, choice, exists, expert, slot, K, WEIGHT, JITTER,
            N_GROUP, TOPK_GROUP, GROUP_SIZE, GROUP_SCORE, RULED_OUT,
            BLOCK_T, BLOCK_K, BLOCK_G, BLOCK_S,
        )  # fmt: skip
    if NUM_SHARED > 0:
        ids = tl.where(slot < K, ids, E + slot - K)

    mask = (row < T) & (slot < K + NUM_SHARED)
    in_range = mask & (ids >= 0) & (ids < E + NUM_SHARED)
    # What won the selection is the score itself, unless something else had a say in it.
    ONLY_SCORE: tl.constexpr = (
        bias_ptr is None and given_ids_ptr is None and NUM_SHARED == 0 and RULED_OUT == "never"
    )
    if WEIGHT == "sparsemixer" or (ONLY_SCORE and (SCORE == "logit" or WEIGHT == "score")):
        s = values
        weighs = values > -LARGEST
    else:
        # The logits are still in the L1 cache; holding all scores would cost registers.
        ptrs = row_ptr + ids.to(tl.int64) * stride_e
        logit = _load_logits(ptrs, stride_part, in_range, NUM_PARTS, sums_ptr.dtype.element_ty)
        s = _prepare(logit, LOGIT_SCALE, SOFTCAP)
        weighs = s > -LARGEST
        if WEIGHT == "score":
            s = _score(s, top, total, SCORE)
    # A number that is subnormal in fp32 comes as fp64.
    epsilon = tl.full((1, 1), epsilon, tl.float32)
    min_sum = tl.full((1, 1), min_sum, tl.float32)
    weights = _weigh(s, mask, epsilon, min_sum, WEIGHT, RENORMALIZE) * scaling_factor
    if expert_scale_ptr is not None:
        ptrs = expert_scale_ptr + ids.to(tl.int64) * stride_scale
        weights *= widen(tl.load(ptrs, mask=in_range & (ids < E), other=1.0)).to(tl.float32)
    weights = tl.where(any_finite & weighs, weights, 0.0)
    weights = narrow(weights, weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + row * (K + NUM_SHARED) + slot, weights, mask=mask)
    tl.store(ids_ptr + row * (K + NUM_SHARED) + slot, ids, mask=mask)
    if expert_counts_ptr is not None:
        tl.atomic_add(expert_counts_ptr + ids, 1, mask=in_range & (ids < E), sem="relaxed")


def _rows_and_warps(num_rows: int, width: int, *, grouped: bool) -> tuple[int, int]:
    """Rows of a program, and its warps, for rows of `width` columns (a power of two).

    While the GPU holds all programs at once, a short program is done first: 4 values in a lane.
    With more rows, starting programs is what takes the time, and each gets more of them; not with
    groups, which need more registers. Measured on an H200 with 8, 64, 128 and 256 experts.
    """
    if num_rows < MANY_ROWS or grouped:
        return min(16, max(1, 128 // width)), 1
    if width <= 16:
        return 1024 // width, 4  # a row is within a warp, so that more warps are more rows
    return max(1, 512 // width), 1


def route(
    logits: Tensor,
    *,
    top_k: int,
    score: str = "logit",
    weight: str = "score",
    renormalize: bool = False,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    topk_ids: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    group_score: str = "top2",
    ruled_out: str = "never",
    num_shared: int = 0,
    logit_scale: float = 1.0,
    logit_softcap: float = 0.0,
    jitter: float = 0.0,
    scaling_factor: float = 1.0,
    epsilon: float = 0.0,
    min_sum: float = 0.0,
    probs: Tensor | None = None,
    expert_counts: Tensor | None = None,
    sums: Tensor | None = None,
    weights_dtype: torch.dtype = torch.float32,
    ids_dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor]:
    """Logits (T, E) fp32/fp16/bf16, any strides -> topk_weights (T, K), rounded once from fp32 to
    `weights_dtype`, and topk_ids (T, K).

    `bias` and `expert_scale` are (E,), of any float dtype; `topk_ids` (T, K) of any integer dtype
    replace the selection. `probs` (T, E) fp32, contiguous, receives the softmax of every row, and
    `expert_counts` (E,) int32 is added to. With `num_shared`, S, the logits are (T, E + S) and the
    results (T, K + S). The caller has seen to it that n_group divides E and that the kept groups
    hold at least `top_k` experts.

    The logits may also come in parts (P, T, E) fp32, as `router_linear` makes them: their sum is
    rounded to the dtype of `sums` (T, E), contiguous, which receives it. Not with `num_shared`.
    """
    num_parts = logits.shape[0] if logits.ndim == 3 else 0
    *stride_part, stride_t, stride_e = logits.stride()
    T, E = logits.shape[-2], logits.shape[-1] - num_shared
    weights = logits.new_empty((T, top_k + num_shared), dtype=weights_dtype)
    ids = logits.new_empty((T, top_k + num_shared), dtype=ids_dtype)
    if T == 0:
        return weights, ids
    block_g = next_power_of_2(n_group)
    block_s = next_power_of_2(E // n_group)
    block_t, num_warps = _rows_and_warps(T, block_g * block_s, grouped=n_group > 1)
    launch(
        _route_kernel, (cdiv(T, block_t),),
        weights, ids, probs, expert_counts, weights if sums is None else sums,
        logits, bias, expert_scale, topk_ids,
        T, *(stride_part or (0,)), stride_t, stride_e,
        0 if bias is None else bias.stride(0),
        0 if expert_scale is None else expert_scale.stride(0),
        *((0, 0) if topk_ids is None else topk_ids.stride()),
        scaling_factor, epsilon, min_sum,
        E=E, K=top_k, NUM_SHARED=num_shared,
        SCORE=score, WEIGHT=weight, RENORMALIZE=renormalize,
        LOGIT_SCALE=logit_scale, SOFTCAP=logit_softcap, JITTER=jitter,
        N_GROUP=n_group, TOPK_GROUP=topk_group, GROUP_SCORE=group_score, RULED_OUT=ruled_out,
        NUM_PARTS=num_parts, BLOCK_T=block_t, BLOCK_K=next_power_of_2(top_k + num_shared),
        BLOCK_G=block_g, BLOCK_S=block_s,
        num_warps=num_warps, **pdl_options(logits.device),
    )  # fmt: skip
    return weights, ids
