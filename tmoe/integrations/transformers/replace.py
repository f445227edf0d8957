"""`tmoe.replace_moe`: put the MoE modules of a loaded transformers model on tmoe, in place."""

from __future__ import annotations

from torch import nn

from tmoe.arguments import SCHEMES
from tmoe.checks import expect_type

from .register import register
from .report import Report


def replace_moe(model: nn.Module, scheme: str | None = None) -> Report:
    """Run the MoE modules of `model` on tmoe, in place; no parameter is moved, copied or renamed.

    Experts on transformers' interface are switched through their config. The modules of families
    that are not on it (Llama 4, DBRX, JetMoE's MLPs, LongCat-Flash, Step-3.7), and the routers of
    all, change class, to a subclass with another `forward`; a router is called as before and
    returns what it returned. Shared experts, hooks and state dict stay as they are. Calling it
    again is fine: it finds what runs on tmoe already. What it doesn't know, it leaves alone and
    reports.

    Copies and pickles of the model stay replaced; a process that loads such a pickle calls
    `register`.

    Args:
        model: usually a model of transformers, or any module with one inside.
        scheme: None, the weights as loaded.

    Returns:
        A `Report`. A model without MoE gives an empty one, which says so when printed.

    Raises:
        ImportError: transformers is missing or has no experts interface.
        TypeError: `model` is not a module.
        ValueError: `scheme` is not None.
    """
    expect_type(model, nn.Module, "replace_moe", "model")
    if scheme is not None:
        raise ValueError(
            f"replace_moe: scheme must be None, which keeps the weights as loaded, got {scheme!r}: "
            f"quantising a loaded model is not available (schemes of tmoe: {', '.join(SCHEMES)})"
        )
    register()
    from .switch import switch_all  # imports transformers

    report = Report()
    switch_all(model, report)
    return report
