"""The activations of `activation.py` in torch, in a file of their own: the torch backend needs no
Triton.

Clamps are selects here too. Their gradient passes on the limit itself, with every torch; that of
torch's `clamp` does so up to 2.13 and is 0 from 2.14 on.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def clamp_above_ref(x: Tensor, limit: float) -> Tensor:
    """x, or `limit` where x is above it."""
    return x.masked_fill(x > limit, limit)


def clamp_both_ref(x: Tensor, limit: float) -> Tensor:
    """x, or the limit with its sign where |x| is above it."""
    return x.masked_fill(x > limit, limit).masked_fill(x < -limit, -limit)


def activate_ref(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    name: str = "swiglu",
    alpha: float = 1.0,
    limit: float = math.inf,
) -> Tensor:
    """act(gate, up) in the dtype that comes in, any shape. `up` is None for the ungated ones."""
    if limit != math.inf and up is not None:
        up = clamp_both_ref(up, limit)
    if limit != math.inf and name in ("swiglu", "swiglu_oai"):
        gate = clamp_above_ref(gate, limit)
    if name == "swiglu":
        return F.silu(gate) * up
    if name == "swiglu_oai":
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if name == "swiglu_step":
        return clamp_above_ref(F.silu(gate), limit) * up
    if name in ("geglu", "geglu_tanh"):
        return F.gelu(gate, approximate="tanh" if name == "geglu_tanh" else "none") * up
    if name in ("gelu", "gelu_tanh"):
        return F.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none")
    return {"silu": F.silu, "relu2": lambda x: F.relu(x).square(), "identity": lambda x: x}[name](
        gate
    )
