"""The second walk behind `replace_moe`: put each router on tmoe, or say why not."""

from __future__ import annotations

import re

from torch import nn

from .layers import block_of, layer_of
from .report import Report
from .router_kinds import LEFT_ALONE, ONLY_LOGITS
from .routers import router_for, why_not_route
from .swap import class_of, swap_class, why_not_swap

_LOOKS_LIKE_A_ROUTER = re.compile(r"(Router|Gate|Gating)$")


def switch_routers(model: nn.Module, report: Report, wanted: bool) -> None:
    """Switch the routers of `model`, after its experts, and describe the layers in `report`. Not
    wanted: those that are on tmoe already are counted, and the others stay as they are."""
    blocks = {block_of(model, name) for name in report.replaced}
    for name, module in model.named_modules():
        cls, block = router_for(module), name.rpartition(".")[0]
        reason = None
        if cls is not None:
            if wanted:
                reason = _switch(module, cls)
            if class_of(module) is cls:
                report.add_router(name, module)
        elif name in report.replaced and getattr(module, "selects", False):
            report.add_router(name, module)
        elif name != "" and block in blocks:
            reason = _left_alone(module)
        if reason is not None:
            report.skipped[name] = reason
    report.layers = [layer_of(model, name, report.routers) for name in report.replaced]


def _switch(module: nn.Module, cls: type[nn.Module]) -> str | None:
    """Make `module` one of `cls`, if it isn't, or say why not."""
    if class_of(module) is cls:
        return None
    reason = why_not_swap(module) or why_not_route(module, cls)
    if reason is None:
        swap_class(module, cls)
    return reason


def _left_alone(module: nn.Module) -> str | None:
    """The reason for a router that we leave to transformers, or None for what is no router."""
    cls = class_of(module)
    if cls.__name__ in LEFT_ALONE:
        return LEFT_ALONE[cls.__name__]
    if _LOOKS_LIKE_A_ROUTER.search(cls.__name__) and cls.__name__ not in ONLY_LOGITS:
        return f"{cls.__module__}.{cls.__qualname__} is not a router that tmoe knows"
    return None
