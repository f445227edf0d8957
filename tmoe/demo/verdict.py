"""What the demo calls right: no tolerance is picked by hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the demo promised, and whether it held."""

    name: str
    ok: bool
    detail: str


def error_and_bound(got: Tensor, truth: Tensor, peer: Tensor) -> tuple[float, float]:
    """Largest error of `got` against `truth`, and the largest that is allowed.

    That is twice the error of `peer`, which does the same maths in the same dtype, plus one
    rounding step at the scale of the truth, since the peer may happen to be exact.
    """
    truth = truth.double()
    step = torch.finfo(got.dtype).eps * truth.abs().max().item()
    allowed = 2 * (peer.double() - truth).abs().max().item() + step
    return (got.double() - truth).abs().max().item(), allowed


def experts_fp64(
    x: Tensor,  # (T, H)
    gate_up_proj: Tensor,  # (E, 2I, H), gate rows first
    down_proj: Tensor,  # (E, H, I)
    topk_weights: Tensor,  # (T, K)
    topk_ids: Tensor,  # (T, K)
) -> Tensor:
    """`experts_in` fp64."""
    return experts_in(torch.float64, x, gate_up_proj, down_proj, topk_weights, topk_ids)


def experts_in(
    dtype: torch.dtype,
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    weight_on_input: bool = False,
) -> Tensor:
    """A SwiGLU expert layer, one (token, slot) after another in `dtype`: (T, H). For few tokens."""
    out = torch.zeros_like(x, dtype=dtype)
    for t, ids in enumerate(topk_ids.tolist()):
        for k, expert in enumerate(ids):
            weight, row = topk_weights[t, k].to(dtype), x[t].to(dtype)
            row = weight * row if weight_on_input else row
            gate, up = (gate_up_proj[expert].to(dtype) @ row).chunk(2)
            row = down_proj[expert].to(dtype) @ (gate / (1 + torch.exp(-gate)) * up)
            out[t] += row if weight_on_input else weight * row
    return out
