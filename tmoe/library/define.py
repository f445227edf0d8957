"""How an op gets into torch.ops.tmoe, and the version that all of them have.

torch.compile keeps what it compiled on disk. Its key has the names of the ops in the graph that was
traced, but neither their schemas nor the ops of their backwards, so code that was compiled for
another version of tmoe would be found and would call today's ops with yesterday's arguments. The
name of an overload is in that key too, and profilers don't show it: `tmoe::fused_experts` has one
overload, `torch.ops.tmoe.fused_experts.v1`.

Bump `OVERLOAD` with every change of a schema, or of what an argument or a result means.
`tests/library/test_schemas.py` compares all schemas with those that were recorded with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

OVERLOAD = "v1"

_LIBRARY = torch.library.Library("tmoe", "DEF")


def implement(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define the op of a schema, `name(arguments) -> results`; `fake` makes empty results."""
    name, parenthesis, rest = schema.partition("(")
    _LIBRARY.define(_full(name) + parenthesis + rest, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_full(name), run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tmoe::{_full(name)}", fake, lib=_LIBRARY)


def implement_autograd(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]
) -> None:
    torch.library.register_autograd(
        f"tmoe::{_full(name)}", backward, setup_context=setup_context, lib=_LIBRARY
    )


def operator(name: str) -> OpOverload[..., Any]:
    """The op that `implement` defined."""
    op: OpOverload[..., Any] = getattr(getattr(torch.ops.tmoe, name), OVERLOAD)
    return op


def _full(name: str) -> str:
    return f"{name}.{OVERLOAD}"
