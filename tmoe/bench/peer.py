"""What a peer is: somebody else's MoE layer behind the same call as everybody's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from ..environment import installed_version
from ..formats import QuantizedTensor

Weight = Tensor | QuantizedTensor
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


class Missing(Exception):
    """A peer can't run here, or not this: a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody's layer, and what has to be installed for it."""

    name: str
    what: str
    package: str | None  # as pip knows it; None: torch alone
    make: Callable[..., Layer]
    schemes: tuple[str, ...] = ("bf16",)
    waits: bool = False  # reads numbers back from the GPU in a call, so a CUDA graph can't hold it

    def layer(
        self, gate_up_proj: Weight, down_proj: Weight, scheme: str = "bf16", **scales: Tensor
    ) -> Layer:
        """With the static scales of rows that a scheme is measured with. Raises `Missing` with the
        reason."""
        if scheme not in self.schemes:
            raise Missing(f"{self.name} is measured in {', '.join(self.schemes)}, not in {scheme}")
        if self.package is not None and installed_version(self.package) is None:
            raise Missing(f"{self.name} needs {self.package}, which isn't installed")
        return self.make(gate_up_proj, down_proj, scheme, **scales)


def module(name: str) -> Any:
    """A module of a package that is installed, though perhaps not for this machine."""
    try:
        return import_module(name)
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        raise Missing(f"{name} can't be imported: {error}") from error
