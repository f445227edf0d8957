"""The activations of `activation.py` in torch, in a file of their own: the torch backend needs no
Triton."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


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
        up = up.clamp(-limit, limit)
    if limit != math.inf and name in ("swiglu", "swiglu_oai"):
        gate = gate.clamp(max=limit)
    if name == "swiglu":
        return F.silu(gate) * up
    if name == "swiglu_oai":
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if name == "swiglu_step":
        return F.silu(gate).clamp(max=limit) * up
    if name in ("geglu", "geglu_tanh"):
        return F.gelu(gate, approximate="tanh" if name == "geglu_tanh" else "none") * up
    if name in ("gelu", "gelu_tanh"):
        return F.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none")
    return {"silu": F.silu, "relu2": lambda x: F.relu(x).square(), "identity": lambda x: x}[name](
        gate
    )
