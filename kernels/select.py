"""Selection: of each row's E choices the K largest, in descending order; `route.py` is built on it.

A choice becomes an int32 key in the order of the floats, since the maximum of integers across a
warp is one instruction. Then K times: the largest key, the lowest index that has it, out with it.
Rows are [BLOCK_T, 1], experts [1, N]; N = BLOCK_S * BLOCK_G columns, some without an expert.
"""

import torch
import triton
import triton.language as tl

from tmoe.kernels.elementary import exp

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
NEVER = tl.constexpr(-(2**31))  # a key below that of any float: already taken, or not an expert
NO_INDEX = tl.constexpr(2**31 - 1)


@triton.jit
def _key(x):
    """int32 in the order of the floats: integer maxima across a warp are one instruction."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 = 0: the two zeros are a tie
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _take_best(key, index):
    """Each row's largest key, its index, the lowest of equals, and the keys without it."""
    best = tl.max(key, axis=1, keep_dims=True)
    taken = tl.min(tl.where(key == best, index, NO_INDEX), axis=1, keep_dims=True)
    return best, taken, tl.where(index == taken, NEVER, key)


@triton.jit
def _two_best(best_a, second_a, best_b, second_b):
    second = tl.maximum(tl.minimum(best_a, best_b), tl.maximum(second_a, second_b))
    return tl.maximum(best_a, best_b), second


@triton.jit
def _in_kept_groups(
    choice, exists,
    N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """[BLOCK_T, BLOCK_S * BLOCK_G] bool: is the expert's group one of the TOPK_GROUP best?"""
    members = tl.reshape(tl.where(exists, choice, -LARGEST), (BLOCK_T, BLOCK_S, BLOCK_G))
    if GROUP_SCORE == "max" or GROUP_SIZE == 1:
        group_score = tl.max(members, axis=1)
    else:
        tl.static_assert(GROUP_SCORE == "top2", "unknown group score")
        nothing = tl.full((BLOCK_T, BLOCK_S, BLOCK_G), -LARGEST, tl.float32)
        first, second = tl.reduce((members, nothing), 1, _two_best)
        group_score = first + second
    groups = tl.arange(0, BLOCK_G)[None, :]
    key = tl.where(groups < N_GROUP, _key(group_score), NEVER)
    for _ in range(TOPK_GROUP):
        _best, _taken, key = _take_best(key, groups)
    kept = (key == NEVER)[:, None, :].broadcast_to(BLOCK_T, BLOCK_S, BLOCK_G)
    return tl.reshape(kept, (BLOCK_T, BLOCK_S * BLOCK_G))


@triton.jit
def select(
    x, choice, exists, expert, slot,
    K: tl.constexpr, WEIGHT: tl.constexpr, JITTER: tl.constexpr,
    N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUP_SCORE: tl.constexpr, RULED_OUT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The K best experts, in order, and the choice that won (of SparseMixer: the weight)."""
    key = tl.where(exists, _key(choice), NEVER)
    if N_GROUP > 1:
        kept = _in_kept_groups(
            choice, exists, N_GROUP, TOPK_GROUP, GROUP_SIZE, GROUP_SCORE, BLOCK_T, BLOCK_G, BLOCK_S
        )
        # Most models leave the other groups out; some give their experts the choice 0 instead.
        left_out = tl.where(exists, 0, NEVER) if RULED_OUT == "zero" else NEVER
        key = tl.where(kept, key, left_out)
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    values = tl.full((BLOCK_T, BLOCK_K), -LARGEST, tl.float32)
    for k in range(K):
        best, taken, others = _take_best(key, expert)
        value = _from_key(best)
        if WEIGHT == "sparsemixer":
            distance = tl.div_rn(value - x, tl.maximum(tl.abs(x), value))
            near = (key != NEVER) & ~(distance > 2.0 * JITTER)  # NaN, from 0 / 0, is near
            total = tl.sum(tl.where(near, exp(x - value), 0.0), axis=1, keep_dims=True)
            value = tl.where(value > -LARGEST, tl.div_rn(1.0, total), value)
        ids = tl.where(slot == k, taken, ids)
        values = tl.where(slot == k, value, values)
        key = others
    return ids, values
