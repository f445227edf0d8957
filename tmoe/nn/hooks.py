"""What `watch_load` and `RoutingReplay` share: finding a model's routers, and knowing a recompute.

Gradient checkpointing runs a part of the model a second time, inside the backward pass, to get back
what the forward pass did not keep. Python can see that only through the node of the autograd graph
that is asking for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..checks import expect, expect_type
from .router import Router


def routers_of(model: nn.Module, op: str) -> dict[str, Router]:
    """The routers of `model` by name; ``ValueError`` if there is none."""
    expect_type(model, nn.Module, op, "model")
    routers = {name: part for name, part in model.named_modules() if isinstance(part, Router)}
    expect(bool(routers), op, "model", "one with a tmoe.Router in it", type(model).__name__)
    return routers


def refuse_compile(op: str) -> None:
    """Raise while `torch.compile` traces: what it traces once, it doesn't call again."""
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{op}: a router inside torch.compile can't be followed; run it eagerly")


def backward_node() -> Any:
    """The autograd node that is running; None outside of a backward pass."""
    return torch._C._current_autograd_node()


def next_number() -> int:
    """The number that autograd will give to the next node; they only grow, within a thread."""
    return torch.autograd._get_sequence_nr()
