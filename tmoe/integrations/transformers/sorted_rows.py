"""Gather, run, scatter: the way for experts whose middle only their own module can compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor


def through_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    expert: Callable[[Tensor, Tensor], Tensor],
    *,
    weight_on_input: bool = False,
) -> Tensor:
    """Weighted sum over k of what `expert` makes of each (token, slot) row, in fp32 and slot order.

    Args:
        x: (T, H).
        topk_ids: (T, K). Rows whose id is outside [0, num_experts) are sorted past the last offset,
            where `grouped_gemm` reads nothing and gives no gradient; their result becomes zero.
        topk_weights: (T, K); multiply the output rows, or with `weight_on_input` the input rows.
        expert: maps rows (S, H), sorted by expert, and offsets (E+1,) int32, exclusive, to rows
            (S, H_out).

    Returns:
        (T, H_out) in `x`' dtype.
    """
    T, K = topk_ids.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    local = (topk_ids >= 0) & (topk_ids < num_experts)  # (T, K)
    # Selects, not products with zero: what stands in a skipped slot may be NaN.
    weights = topk_weights.to(wide).masked_fill(~local, 0.0)
    sorted_ids, order = topk_ids.where(local, num_experts).flatten().sort(stable=True)  # (S,)
    bounds = torch.arange(num_experts + 1, device=x.device, dtype=sorted_ids.dtype)
    expert_offsets = torch.searchsorted(sorted_ids, bounds, out_int32=True)

    rows = x[order // K]  # (S, H)
    if weight_on_input:
        rows = (rows * weights.flatten()[order, None]).to(x.dtype)
    out = expert(rows, expert_offsets)[order.argsort()].to(wide)
    out = out.view(T, K, out.shape[-1]).masked_fill(~local[..., None], 0.0)
    if not weight_on_input:
        out = out * weights[..., None]
    return reduce(torch.add, out.unbind(1)).to(x.dtype)
