"""The walk behind `replace_moe`: find each MoE module, switch it or say why not."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from tmoe.arguments import FLOATS

from .activations import ExpertsModule
from .families import LEFT_ALONE, adapter_for, looks_like_moe
from .fp8_experts import is_fp8_experts, why_not_fp8
from .register import NAME
from .report import PREVIOUS, Report
from .routers import router_for
from .swap import class_of, original_class, swap_class, why_not_swap
from .switch_routers import switch_routers
from .wrapped import unwrapped


def switch_all(model: nn.Module, report: Report, routers: bool) -> None:
    """Switch what can be switched in `model`, perhaps without its routers, and fill `report`."""
    fp8 = [module for module in model.modules() if is_fp8_experts(module)]
    fixed = {id(m.config) for m in fp8 if _why_not_switch_fp8(m) is not None}
    on_interface: list[ExpertsModule] = []
    unknown: dict[str, str] = {}
    for name, module in model.named_modules():
        if any(_is_inside(name, parent) for parent in (*report.replaced, *report.skipped)):
            continue
        class_name = class_of(module).__name__
        adapter = None if router_for(module) is not None else adapter_for(module)
        reason = None
        if adapter is not None:
            reason = _why_not_adapt(module, adapter)
            if reason is None:
                report.add(name, *_adapt(module, adapter))
        elif class_name in LEFT_ALONE:
            reason = LEFT_ALONE[class_name]
        elif (is_fp8 := is_fp8_experts(module)) or _dispatches(module):
            reason = _why_not_switch_fp8(module) if is_fp8 else _why_not_weights(module)
            if reason is None and id(module.config) in fixed:
                reason = "it shares its config, and so its implementation, with others left alone"
            if reason is None:
                on_interface.append(module)
                report.add(name, module)
        elif looks_like_moe(module):
            cls = class_of(module)
            unknown[name] = f"{cls.__module__}.{cls.__qualname__} is not a class that tmoe knows"
        if reason is not None:
            report.skipped[name] = reason

    _set_implementation(on_interface)
    known = (*report.replaced, *report.skipped)
    for name, reason in unknown.items():
        outermost = not any(_is_inside(name, other) for other in unknown if other != name)
        if outermost and not any(_is_inside(inner, name) for inner in known):
            report.skipped[name] = reason
    switch_routers(model, report, routers)


# What says where a module's weights are: transformers' decorator, or our adapters.
_ABOUT_WEIGHTS = ("has_gate", "weight_names", "cannot_quantize")


def expert_modules(model: nn.Module) -> Iterator[tuple[str, ExpertsModule]]:
    """The modules of `model` that hold experts' weights and run, or can run, on tmoe."""
    for name, module in model.named_modules():
        describes = any(hasattr(module, about) for about in _ABOUT_WEIGHTS)
        if describes and (original_class(module) is not None or _dispatches(module)):
            yield name, module


def _is_inside(name: str, parent: str) -> bool:
    return name == parent or parent == "" or name.startswith(f"{parent}.")


def _why_not_switch_fp8(module: nn.Module) -> str | None:
    if not _dispatches(module, ALL_FP8_EXPERTS_FUNCTIONS):
        return "its FP8Experts don't look their implementation up in transformers' registry"
    return why_not_fp8(module)


def _dispatches(module: nn.Module, registry: ExpertsInterface = ALL_EXPERTS_FUNCTIONS) -> bool:
    """Whether the module's forward looks its implementation up in that registry of transformers.

    Read off the decorator's wrapper, which closes over the registry. The flags that the decorator
    also sets would be no proof: a subclass with a forward of its own, which no config changes, has
    them too.
    """
    closure = getattr(type(module).forward, "__closure__", None) or ()
    return any(cell.cell_contents is registry for cell in closure)


def _set_implementation(modules: list[ExpertsModule]) -> None:
    """Name tmoe in each module's config: some models hold a copy of the config per layer."""
    # All read before the first write, since most modules share one config.
    current = [module.config._experts_implementation for module in modules]
    for module, implementation in zip(modules, current, strict=True):
        if implementation != NAME:
            setattr(module, PREVIOUS, implementation)
            module.config._experts_implementation_internal = NAME


def _why_not_weights(module: nn.Module) -> str | None:
    dtypes = sorted({str(p.dtype) for p in module.parameters() if p.dtype not in FLOATS})
    return f"its weights are {', '.join(dtypes)}, which tmoe can't multiply yet" if dtypes else None


def _why_not_adapt(module: nn.Module, adapter: type[nn.Module]) -> str | None:
    parts = getattr(adapter, "parts", {})
    for name, part_adapter in parts.items():
        part = unwrapped(getattr(module, name))
        if class_of(part) not in (part_adapter, part_adapter.__bases__[0]):
            wanted = part_adapter.__bases__[0].__name__
            return (
                f"its {name} are {type(part).__name__}, not {wanted}; replace before wrapping them"
            )
        if reason := why_not_swap(part) or _why_not_weights(part):
            return reason
    if reason := why_not_swap(module) or (None if parts else _why_not_weights(module)):
        return reason
    return adapter.why_not(module) if hasattr(adapter, "why_not") else None


def _adapt(module: nn.Module, adapter: type[nn.Module]) -> list[nn.Module]:
    """Change the class of `module` and its parts; returns them."""
    parts = getattr(adapter, "parts", {})
    changed = [
        (module, adapter),
        *((unwrapped(getattr(module, name)), part) for name, part in parts.items()),
    ]
    for each, cls in changed:
        if class_of(each) is not cls:
            swap_class(each, cls)
    return [each for each, _ in changed]
