"""watch_load: the expert load of every router of a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..routing.load import ExpertLoad
from .hooks import backward_node, refuse_compile, routers_of


class ModelLoad(dict[str, ExpertLoad]):
    """`ExpertLoad` by the name of its router; printed as a table with a line for each."""

    def all_reduce(self, group: Any = None) -> ModelLoad:
        """The sums over the ranks of `group` (all ranks if None), as a new `ModelLoad`."""
        return ModelLoad({name: load.all_reduce(group) for name, load in self.items()})

    def reset(self) -> None:
        """Start from zero."""
        for load in self.values():
            load.reset()

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {load.summary()}" for name, load in self.items())


@contextmanager
def watch_load(model: nn.Module) -> Iterator[ModelLoad]:
    """Count, inside the ``with``, which experts every `tmoe.Router` of `model` chooses.

        with tmoe.watch_load(model) as load:
            model(tokens)
        print(load)
        print(load["layers.3.gate"].dead)

    Every token counts, padding too. What gradient checkpointing recomputes counts once. Nothing
    waits for the device until the counts are looked at. Warns if no router ran: a model that
    `torch.compile` compiled before, or a CUDA graph, runs without its hooks; inside a new
    compilation it raises.

    Raises:
        ValueError: the model has no `tmoe.Router`.
    """
    routers = routers_of(model, "watch_load")
    load = ModelLoad(
        {
            name: ExpertLoad(router.routing.num_experts, device=router.weight.device)
            for name, router in routers.items()
        }
    )
    ran = False

    def count(name: str) -> Any:
        def hook(router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            nonlocal ran
            refuse_compile("watch_load")
            if backward_node() is None:
                load[name].add_ids(output[2])
                ran = True

        return hook

    handles = [router.register_forward_hook(count(name)) for name, router in routers.items()]
    try:
        yield load
    finally:
        for handle in handles:
            handle.remove()
    if not ran:
        why = "compiled code and CUDA graphs call no hooks"
        warnings.warn(f"watch_load: no router of the model ran ({why})", stacklevel=3)
