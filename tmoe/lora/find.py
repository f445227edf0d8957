"""Which modules of a model hold experts that can have adapters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ..checks import expect, expect_type
from ..integrations.transformers.quantized import PARALLEL
from ..nn import Experts
from ..nn.lora import LORA, ExpertsLora


class Target(NamedTuple):
    """A module of experts.

    Attributes:
        name: in the model.
        module: `tmoe.Experts`, or experts of transformers that run on tmoe.
        weights: names of the parameters of its two projections.
        transposed: they are stored as (E, D, N).
        swapped: so they are, and PEFT isn't told: it takes N for the inputs.
    """

    name: str
    module: nn.Module
    weights: tuple[str, str]
    transposed: bool = False
    swapped: bool = False

    @property
    def lora(self) -> ExpertsLora | None:
        lora = getattr(self.module, LORA, None)
        return lora if isinstance(lora, ExpertsLora) else None

    @property
    def parallel(self) -> Any:
        """How `tmoe.parallel` divided the experts; None if it didn't."""
        module: Any = self.module
        return vars(module).get(PARALLEL) or getattr(module, "parallel", None)

    def whole_sizes(self, weight: str) -> tuple[int, int, int]:
        """`sizes` of all experts, with their whole width, of which this rank may have a part."""
        E, N, D = self.sizes(weight)
        parallel, last = self.parallel, self.weights[1]
        if parallel is None:
            return E, N, D
        E, I = parallel.placement.num_experts, parallel.words["intermediate_size"]
        return (E, N, I) if weight == last else (E, N // self.sizes(last)[2] * I, D)

    def sizes(self, weight: str) -> tuple[int, int, int]:
        """(E, N, D) of that projection."""
        E, N, D = self.module.get_parameter(weight).shape
        # LongCat-Flash has gate and up rows for experts that don't exist.
        E = min(E, self.module.get_parameter("down_proj").shape[0])
        return (E, D, N) if self.transposed else (E, N, D)


def targets(model: nn.Module, op: str) -> list[Target]:
    """The experts of `model`; ``ValueError`` if there are none, or some that can't be adapted."""
    expect_type(model, nn.Module, op, "model")
    found = [
        Target(name, module, (module._first, "down_proj"))
        for name, module in model.named_modules()
        if isinstance(module, Experts)
    ]
    if "transformers" in sys.modules:
        found += _of_transformers(model, op)
    wanted = "one with experts on tmoe: tmoe.MoE layers, or call tmoe.replace_moe(model) first"
    expect(bool(found), op, "model", wanted, type(model).__name__)
    return found


def adapted(model: nn.Module, op: str) -> list[tuple[Target, ExpertsLora]]:
    """Those that have adapters; ``ValueError`` if there are none."""
    found = [(t, t.lora) for t in targets(model, op) if t.lora is not None]
    wanted = "one with adapters from tmoe.lora.add or tmoe.lora.load"
    expect(bool(found), op, "model", wanted, f"{type(model).__name__} without")
    return found


def _of_transformers(model: nn.Module, op: str) -> Iterator[Target]:
    from ..integrations.transformers.quantized import is_transposed, weight_names
    from ..integrations.transformers.register import NAME
    from ..integrations.transformers.swap import original_class
    from ..integrations.transformers.switch import expert_modules

    for name, module in expert_modules(model):
        config = getattr(module, "config", None)
        named = getattr(config, "_experts_implementation", None) == NAME
        if isinstance(module, Experts) or not (named or original_class(module) is not None):
            continue
        weights = weight_names(module)
        plain = all(isinstance(module._parameters.get(weight), nn.Parameter) for weight in weights)
        wanted = "one whose experts have both projections as parameters of their own"
        expect(plain, op, "model", wanted, f"{name} ({type(module).__name__})")
        transposed = is_transposed(module)
        told = getattr(module, "is_transposed", False)
        yield Target(name, module, weights, transposed, transposed and not told)
