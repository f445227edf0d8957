"""Modules that PEFT has wrapped: what is inside, and the weight that they stand for.

PEFT adapts a parameter of a module by a wrapper around it, which takes its name and builds the
adapted weight while its `forward` runs. Whoever reads the weight without calling it has to ask.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def unwrapped(module: Any) -> Any:
    """The module inside PEFT's wrappers, or `module` itself."""
    while hasattr(module, "get_base_layer"):
        module = module.get_base_layer()
    return module


def read_weight(module: Any, name: str = "weight") -> Tensor:
    """The parameter `name` of `module`, with the adapters of PEFT's wrappers around the module.

    Raises:
        TypeError: a wrapper whose effect on the weight isn't an addition (or another library's).
    """
    wrappers = []
    while hasattr(module, "get_base_layer"):
        wrappers.append(module)
        module = module.base_layer
    weight = getattr(module, name)
    for wrapper in wrappers:
        if not hasattr(wrapper, "get_delta_weight"):
            raise TypeError(
                f"tmoe reads {type(module).__name__}.{name} and can't apply what "
                f"{type(wrapper).__name__} does to it; restore the module before adapting it"
            )
        if wrapper.disable_adapters or wrapper.merged:
            continue
        for adapter in wrapper.active_adapters:
            if adapter in wrapper.lora_A and wrapper.parameter_name == name:
                weight = weight + wrapper.get_delta_weight(adapter)
    return weight
