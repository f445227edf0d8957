"""Subclasses of transformers' routers that run on tmoe, made when they are first asked for.

``TmoeMixtralTopKRouter`` is a `MixtralTopKRouter` without more state whose `forward` is one of
`router_forward.py`. It is an attribute of this module (`__getattr__`), so that copies and pickles
of a replaced model find it by name.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from torch import nn

from tmoe.arguments import FLOATS

from . import router_forward
from .compare_router import is_known, why_not_alike
from .router_kinds import ROUTERS, Kind
from .swap import class_of, original_class

_FOLDERS = {name: folder for folder, names in ROUTERS.items() for name in names}


@cache
def __getattr__(name: str) -> type[nn.Module]:
    original_name = name.removeprefix("Tmoe")
    folder = _FOLDERS.get(original_name)
    if folder is None or original_name == name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    original = getattr(import_module(_file(folder)), original_name)
    kind = ROUTERS[folder][original_name]
    members = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": f"{original_name} on tmoe.",
        "tmoe_kind": kind,
        "tmoe_original": original,
        kind.method: getattr(router_forward, kind.forward),
    }
    return type(name, (original,), members)


def _file(folder: str) -> str:
    return f"transformers.models.{folder}.modeling_{folder}"


def router_for(module: nn.Module) -> type[nn.Module] | None:
    """Our subclass of the module's class if it is a router that we know, or the class if ours."""
    cls = class_of(module)
    if original_class(module) is not None:
        return cls if cls.__module__ == __name__ else None
    folder = _FOLDERS.get(cls.__name__)
    if folder is None or cls.__module__ != _file(folder):
        return None
    if not hasattr(cls, ROUTERS[folder][cls.__name__].method):
        return None  # a block that selected by itself in older versions
    return __getattr__(f"Tmoe{cls.__name__}")


def why_not_route(module: nn.Module, cls: type[nn.Module]) -> str | None:
    """Why `cls` can't stand in for the class of `module`, or None."""
    kind: Kind = cls.tmoe_kind  # type: ignore[attr-defined]
    try:
        routing = router_forward.routing_of(module, kind)
    except (AttributeError, ValueError) as error:
        return str(error)
    paths = [kind.bias] if kind.bias not in ("", "argument") else []
    if kind.weight.endswith("weight") and kind.method == "forward":
        paths.append(kind.weight)  # otherwise a linear layer multiplies, whatever it is made of
    tensors = {path: router_forward.read(module, path) for path in paths}
    # A module inside it is not called by us, so weights would not be loaded for it.
    if any("." in path and tensor.is_meta for path, tensor in tensors.items()):
        return "its weights are offloaded, or not loaded yet"
    if kind.weight in tensors and len(tensors[kind.weight]) != routing.num_logits:
        rows = len(tensors[kind.weight])
        return f"its weight has {rows} rows, and its numbers say {routing.num_logits} experts"
    dtypes = sorted({str(t.dtype) for t in tensors.values() if t.dtype not in FLOATS})
    if dtypes:
        return f"its weights are {', '.join(dtypes)}, which tmoe can't multiply yet"
    return None if is_known() else why_not_alike(module, cls)
