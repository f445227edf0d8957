"""What `replace_moe` did to a model, and the way back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import nn

from .layers import Layer
from .swap import original_class, swap_class

# On an experts module: the implementation that its config named before replace_moe. Kept there, so
# that a copy or a pickle of the model can be restored too, by any later report.
PREVIOUS = "_experts_implementation_before_tmoe"


@dataclass(eq=False)
class Report:
    """The result of `replace_moe`; print it.

    Attributes:
        replaced: names of the experts (or blocks) that now run on tmoe, in the model's order.
        routers: names of the routers (or blocks that route) that now run on tmoe.
        skipped: names of the modules that look like MoE and were left alone, with the reason.
        layers: what was done, by MoE layer.
    """

    replaced: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    routers: list[str] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    # Weak references: a report that is kept must not keep the weights.
    _modules: list[ref[nn.Module]] = field(default_factory=list, repr=False)

    def add(self, name: str, *modules: nn.Module) -> None:
        """Count `name` as replaced; `modules` are what `restore` has to look at."""
        self.replaced.append(name)
        self._modules += [ref(module) for module in modules]

    def add_router(self, name: str, module: nn.Module) -> None:
        """Count `name` as a router on tmoe."""
        self.routers.append(name)
        self._modules.append(ref(module))

    def restore(self) -> None:
        """Undo the replacement exactly: every class and experts implementation is what it was.

        Calling it twice is fine. After `replace_moe` was called twice, either report restores the
        original.
        """
        for reference in self._modules:
            module: Any = reference()
            if module is None:
                continue
            if PREVIOUS in vars(module):
                module.config._experts_implementation_internal = vars(module).pop(PREVIOUS)
            elif (original := original_class(module)) is not None:
                swap_class(module, original)

    def __str__(self) -> str:
        lines = []
        if not self.replaced and not self.routers and not self.skipped:
            lines.append("warning: no MoE module found in this model; nothing was replaced")
        elif not self.replaced and not self.routers:
            lines.append("warning: no MoE module was replaced")
        elif self.replaced:
            count = len(self.layers)
            lines.append(f"{count} MoE layer{'s run' if count > 1 else ' runs'} on tmoe:")
            lines += [f"  {layer}" for layer in self.layers]
        inside = {layer.router_name for layer in self.layers}
        alone = [name for name in self.routers if name not in inside]
        if alone:
            lines.append(f"{len(alone)} routers run on tmoe, their experts don't:")
            lines += [f"  {name}" for name in alone]
        if self.skipped:
            lines.append(f"{len(self.skipped)} left alone:")
            lines += [f"  {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)
