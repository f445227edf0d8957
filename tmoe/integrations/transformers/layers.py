"""The MoE layers of a model, as `Report` shows them: whose experts, router and shared experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .swap import class_of


@dataclass(frozen=True)
class Layer:
    """One MoE layer; the parts are names inside it.

    Attributes:
        name: of the block, or of the decoder layer where there is no block (Gemma 4).
        experts: what runs on tmoe; "" where the block itself does (Llama 4, JetMoE).
        router: what routes on tmoe ("" the block itself), or None where transformers' own does.
        shared: the shared experts, which stay the model's own dense MLP, called as before.
    """

    name: str
    experts: str
    router: str | None
    shared: tuple[str, ...]

    @property
    def router_name(self) -> str | None:
        """The full name of what routes on tmoe."""
        return None if self.router is None else ".".join(filter(None, (self.name, self.router)))

    def __str__(self) -> str:
        parts = [self.experts or "experts"]
        parts.append(self._routing)
        parts += [f"{name} stays the model's own" for name in self.shared]
        return f"{self.name or 'the model'}: {'; '.join(parts)}"

    @property
    def _routing(self) -> str:
        if self.router is None:
            return "the router is transformers'"
        return "routing in it" if self.router in ("", self.experts) else f"router {self.router}"


def block_of(model: nn.Module, experts: str) -> str:
    """The name of the block around a replaced module, or of the module if it is the block."""
    is_block = not class_of(model.get_submodule(experts)).__name__.endswith("Experts")
    return experts if is_block else experts.rpartition(".")[0]


def layer_of(model: nn.Module, experts: str, routers: list[str]) -> Layer:
    """The layer with the replaced module `experts`; `routers` are all that run on tmoe."""
    name = block_of(model, experts)
    block = model.get_submodule(name)
    inside = [r for r in routers if r == name or r.rpartition(".")[0] == name]
    around = model.get_submodule(name.rpartition(".")[0])
    children = [child for module in {id(block): block, id(around): around}.values()
                for child, _ in module.named_children()]  # fmt: skip
    shared = dict.fromkeys(c for c in children if c.startswith("shared") and "gate" not in c)
    return Layer(
        name=name,
        experts=experts.removeprefix(name).removeprefix("."),
        router=inside[0].removeprefix(name).removeprefix(".") if inside else None,
        shared=tuple(shared),
    )
