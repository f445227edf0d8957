"""What `replace_moe` did to a model, and the way back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import nn

from tmoe.formats import ErrorSums

from .layers import Layer
from .quantized import PARALLEL, scheme_of
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
        scheme: what the experts were to be quantised to, or None.
        errors: names of the quantised experts modules, with the error of each projection.
        not_quantized: names of those that kept their weights although a scheme was given, with the
            reason.
    """

    replaced: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    routers: list[str] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    scheme: str | None = None
    errors: dict[str, dict[str, ErrorSums]] = field(default_factory=dict)
    not_quantized: dict[str, str] = field(default_factory=dict)
    # Weak references: a report that is kept must not keep the weights.
    _modules: list[ref[nn.Module]] = field(default_factory=list, repr=False)

    def add(self, name: str, *modules: nn.Module) -> None:
        """Count `name` as replaced; `modules` are what `restore` has to look at."""
        self.replaced.append(name)
        self._modules += [ref(module) for module in modules]

    def covers(self, name: str) -> bool:
        """Whether the module of that name is one that was replaced, or inside one."""
        return any(name == one or name.startswith(f"{one}.") or not one for one in self.replaced)

    def add_router(self, name: str, module: nn.Module) -> None:
        """Count `name` as a router on tmoe."""
        self.routers.append(name)
        self._modules.append(ref(module))

    def restore(self) -> None:
        """Undo the replacement exactly: every class and experts implementation is what it was.

        Calling it twice is fine. After `replace_moe` was called twice, either report restores the
        original.

        Raises:
            RuntimeError: some of the modules hold quantised weights, or a part of the weights
                (`tmoe.parallel`), and the original ones are gone. Nothing has changed then.
        """
        if any(PARALLEL in vars(one) for r in self._modules if (one := r()) is not None):
            raise RuntimeError(
                "restore: the experts are divided among ranks, and this one has a part of them; "
                "load the model again to have it whole"
            )
        held = {scheme_of(one).name for r in self._modules if (one := r()) is not None}
        if schemes := sorted(filter(None, held)):
            raise RuntimeError(
                f"restore: the experts were quantised to {', '.join(schemes)} in place and their "
                "original weights are gone; load the model again to have them"
            )
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
        if self.scheme is not None:
            lines.append(f"{len(self.errors)} experts modules quantised to {self.scheme}:")
            for name, errors in self.errors.items():
                each = ", ".join(f"{arg} {error}" for arg, error in errors.items())
                lines.append(f"  {name}: {each}")
            if self.not_quantized:
                lines.append(f"{len(self.not_quantized)} kept their weights:")
                lines += [f"  {name}: {reason}" for name, reason in self.not_quantized.items()]
        return "\n".join(lines)
