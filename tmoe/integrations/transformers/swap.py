"""Exchange the class of one module and nothing else: parameters, hooks, sub-modules, names stay."""

from __future__ import annotations

from types import MethodType

from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations


def why_not_swap(module: nn.Module) -> str | None:
    """Why exchanging the class would not change what the module computes, or None.

    accelerate puts its own `forward` on the instance and keeps the old one as ``_old_forward``,
    which `swap_class` exchanges. Any other forward on the instance would go on running.
    """
    if "forward" in vars(module) and "_old_forward" not in vars(module):
        return "another library replaced this instance's forward; call replace_moe before it does"
    return None


def swap_class(module: nn.Module, to: type[nn.Module]) -> None:
    """Make `module` an instance of `to`, a sub- or base class of its class that adds no state."""
    if is_parametrized(module):
        # torch parametrises through a subclass made for this instance: make its like over `to`.
        own = {k: v for k, v in vars(type(module)).items() if k not in ("__dict__", "__weakref__")}
        to = type(f"Parametrized{to.__name__}", (to,), own)
    module.__class__ = to
    if "_old_forward" in vars(module):
        vars(module)["_old_forward"] = MethodType(type(module).forward, module)


def original_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that ours stands in for, or None if `module` is of a class that isn't ours."""
    cls = class_of(module)
    ours = cls.__module__.startswith((f"{__package__}.adapters.", f"{__package__}.routers"))
    return cls.__bases__[0] if ours else None


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of `module` below torch's parametrisation."""
    return type_before_parametrizations(module)
