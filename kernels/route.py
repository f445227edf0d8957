"""Route: each token's K experts and their weights, from the router's logits.

    score[e]  = softmax over E, sigmoid, or the logit itself        fp32
    choice[e] = score[e] + bias[e]                                  decides, never enters a weight
    groups    : the E experts are n_group equal blocks; only the topk_group blocks compete whose
                two best choices have the largest sums
    ids       = the K largest choices, in descending order; the lower index wins a tie
    weight[k] = normalise(score[ids[k]]) * scaling_factor

    normalise : none
                sum      s / max(sum of the K + epsilon, min_sum)
                softmax  over the K
                sigmoid  of each

A NaN logit counts as -inf. An expert whose logit is -inf may fill a slot, and then weighs 0; in a
row without a finite logit all weights are 0. T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tmoe.kernels.casts import INTERPRETED, widen
from tmoe.kernels.launch import cdiv, next_power_of_2
from tmoe.kernels.route_ref import route_ref  # noqa: F401  (in torch; usable without Triton)

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
NEVER = tl.constexpr(-(2**31))  # a key below that of any float: already taken, or not an expert
NO_INDEX = tl.constexpr(2**31 - 1)


@triton.jit
def _finite(x):
    """NaN and -inf become the lowest finite number, +inf the largest: no inf - inf after this."""
    x = tl.where(x == x, x, -LARGEST)
    return tl.where(x < -LARGEST, -LARGEST, tl.where(x > LARGEST, LARGEST, x))


@triton.jit
def _exp(x):
    """exp as torch has it on a GPU, so that close scores are ordered as torch orders them."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + _exp(-x))


@triton.jit
def _score(x, top, total, SCORE: tl.constexpr):
    """Scores of logits x; `top` and `total` are the row's maximum and sum of exp(x - top)."""
    if SCORE == "softmax":
        return tl.div_rn(_exp(x - top), total)
    elif SCORE == "sigmoid":
        return _sigmoid(x)
    else:
        tl.static_assert(SCORE == "none", "score must be none, softmax or sigmoid")
        return x


@triton.jit
def _normalise(s, real, epsilon, min_sum, NORMALISE: tl.constexpr):
    """Weights of the selected scores s, [BLOCK_T, BLOCK_K]; slots beyond K are not `real`."""
    if NORMALISE == "softmax":
        s = tl.where(real, s, -LARGEST)
        e = _exp(s - tl.max(s, axis=1, keep_dims=True))
        return tl.div_rn(e, tl.sum(e, axis=1, keep_dims=True))
    elif NORMALISE == "sum":
        total = tl.sum(tl.where(real, s, 0.0), axis=1, keep_dims=True)
        return tl.div_rn(s, tl.maximum(total + epsilon, min_sum))
    elif NORMALISE == "sigmoid":
        return _sigmoid(s)
    else:
        tl.static_assert(NORMALISE == "none", "normalise must be none, sum, softmax or sigmoid")
        return s


@triton.jit
def _key(x):
    """int32 in the order of the floats: integer maxima across a warp are one instruction."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 = 0: the two zeros are a tie
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _take_best(key, index):
    """Each row's index of the largest key, the lowest of equals, and the keys without it."""
    best = tl.max(key, axis=1, keep_dims=True)
    taken = tl.min(tl.where(key == best, index, NO_INDEX), axis=1, keep_dims=True)
    return taken, tl.where(index == taken, NEVER, key)


@triton.jit
def _two_best(best_a, second_a, best_b, second_b):
    second = tl.maximum(tl.minimum(best_a, best_b), tl.maximum(second_a, second_b))
    return tl.maximum(best_a, best_b), second


@triton.jit(do_not_specialize=["T", "stride_t", "stride_e", "stride_bias"])
def _route_kernel(
    weights_ptr,  # (T, K) fp32, written
    ids_ptr,  # (T, K) int32, written
    logits_ptr,  # (T, E)
    bias_ptr,  # (E,) or None
    T, stride_t, stride_e, stride_bias, scaling_factor, epsilon, min_sum,
    K: tl.constexpr, SCORE: tl.constexpr, NORMALISE: tl.constexpr,
    N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(T, BLOCK_T),), one warp each.

    T and the strides are not specialised, so that one layout, hence one order of every sum, serves
    all batches: a row has the same bits in any of them.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    column = tl.arange(0, BLOCK_S * BLOCK_G)[None, :]
    group, member = column % BLOCK_G, column // BLOCK_G  # neighbours: different groups
    expert = group * GROUP_SIZE + member
    exists = (group < N_GROUP) & (member < GROUP_SIZE)
    row_ptr = logits_ptr + row * stride_t
    mask = (row < T) & exists
    x = tl.load(row_ptr + expert.to(tl.int64) * stride_e, mask=mask, other=float("-inf"))
    x = widen(x).to(tl.float32)
    any_finite = tl.max((tl.abs(x) <= LARGEST).to(tl.int32), axis=1, keep_dims=True) > 0
    x = _finite(x)

    top, total = 0.0, 1.0
    if SCORE == "softmax":
        top = tl.max(x, axis=1, keep_dims=True)
        total = tl.sum(_exp(x - top), axis=1, keep_dims=True)
    choice = _score(x, top, total, SCORE)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * stride_bias, mask=exists, other=0.0)
        choice = _finite(choice + widen(bias).to(tl.float32))
    key = tl.where(exists, _key(choice), NEVER)

    if N_GROUP > 1:
        members = tl.reshape(tl.where(exists, choice, -LARGEST), (BLOCK_T, BLOCK_S, BLOCK_G))
        nothing = tl.full((BLOCK_T, BLOCK_S, BLOCK_G), -LARGEST, tl.float32)
        best, second = tl.reduce((members, nothing), 1, _two_best)
        group_score = best if GROUP_SIZE == 1 else best + second
        groups = tl.arange(0, BLOCK_G)[None, :]
        group_key = tl.where(groups < N_GROUP, _key(group_score), NEVER)
        for _ in range(TOPK_GROUP):
            _taken, group_key = _take_best(group_key, groups)
        kept = (group_key == NEVER)[:, None, :].broadcast_to(BLOCK_T, BLOCK_S, BLOCK_G)
        key = tl.where(tl.reshape(kept, (BLOCK_T, BLOCK_S * BLOCK_G)), key, NEVER)

    slot = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for k in range(K):
        taken, key = _take_best(key, expert)
        ids = tl.where(slot == k, taken, ids)

    # The logits of the selected are still in the L1 cache; holding all scores would cost registers.
    mask = (row < T) & (slot < K)
    x = tl.load(row_ptr + ids.to(tl.int64) * stride_e, mask=mask, other=float("-inf"))
    x = _finite(widen(x).to(tl.float32))
    weights = _normalise(_score(x, top, total, SCORE), slot < K, epsilon, min_sum, NORMALISE)
    weights = tl.where(any_finite & (x > -LARGEST), weights * scaling_factor, 0.0)
    tl.store(weights_ptr + row * K + slot, weights, mask=mask)
    tl.store(ids_ptr + row * K + slot, ids, mask=mask)


def route(
    logits: Tensor,
    *,
    top_k: int,
    score: str,
    normalise: str,
    bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scaling_factor: float = 1.0,
    epsilon: float = 0.0,
    min_sum: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Logits (T, E) fp32/fp16/bf16, any strides -> topk_weights (T, K) fp32, topk_ids (T, K) int32.

    `bias` is (E,), of any float dtype. The caller has seen to it that n_group divides E and that
    the kept groups hold at least `top_k` experts.
    """
    T, E = logits.shape
    weights = logits.new_empty((T, top_k), dtype=torch.float32)
    ids = logits.new_empty((T, top_k), dtype=torch.int32)
    if T == 0:
        return weights, ids
    block_g = next_power_of_2(n_group)
    block_s = next_power_of_2(E // n_group)
    # 16 values in each lane of a warp, as far as 16 rows do it; never a function of T.
    block_t = min(16, max(1, 512 // (block_g * block_s)))
    _route_kernel[(cdiv(T, block_t),)](
        weights, ids, logits, bias,
        T, *logits.stride(), 0 if bias is None else bias.stride(0),
        scaling_factor, epsilon, min_sum,
        K=top_k, SCORE=score, NORMALISE=normalise,
        N_GROUP=n_group, TOPK_GROUP=topk_group, GROUP_SIZE=E // n_group,
        BLOCK_T=block_t, BLOCK_K=next_power_of_2(top_k), BLOCK_G=block_g, BLOCK_S=block_s,
        num_warps=1,
    )  # fmt: skip
    return weights, ids
