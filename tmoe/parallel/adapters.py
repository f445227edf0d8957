"""Adapters of experts that several ranks share, put together: `save_adapters`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checks import expect, expect_type
from ..lora.files import write
from ..lora.find import adapted
from ..nn.lora import LORA, ExpertsLora, LoraPair
from .expert_layers import ExpertsLayer, divided_layers
from .expert_parallel import ExpertParallel
from .groups import naming

OP = "save_adapters"


def save_adapters(model: nn.Module, folder: str | Path) -> None:
    """`tmoe.lora.save` for a model that `parallelize` divided: the adapters of all ranks in one
    folder, as one rank would have written them. All ranks of the mesh call it; of each group of
    ranks that share experts the first one writes.

    Raises:
        ValueError: a model without divided experts, or without adapters.
        RankLostError: a rank is gone.
    """
    expect_type(model, nn.Module, OP, "model")
    layers = divided_layers(model)
    expect(bool(layers), OP, "model", "one with layers that parallelize made", type(model).__name__)
    found = []
    for target, _ in adapted(model, OP):
        layer, parallel = layers[target.name]
        everyone, mine = parallel.layout.everyone, Part.of(layer, parallel)
        every: list[Any] | None = [mine]
        if everyone.handle is not None:
            every = [None] * everyone.size if everyone.rank == 0 else None
            with naming(everyone, f"gathering the adapters of {layer.words['layer']}"):
                dist.gather_object(mine, every, dst=everyone.ranks[0], group=everyone.handle)
        if every is not None:
            found.append((target, _whole(layer, parallel, every)))
    if found:
        write(model, found, folder)


class Part(NamedTuple):
    """What a rank has of a layer's adapters."""

    width: int  # its place among those that divide the width
    experts: int  # and among those that divide the experts
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, layer: ExpertsLayer, parallel: ExpertParallel) -> Part:
        layout = parallel.layout
        tensors = {n: layer.module.get_parameter(n).detach().cpu() for n in layer.adapters}
        return cls(layout.width.rank, layout.experts.rank, tensors)


def _whole(layer: ExpertsLayer, parallel: ExpertParallel, every: list[Part]) -> ExpertsLora:
    """Every expert once, with its whole width."""
    pairs, placement = {}, parallel.placement
    for name, mine in layer.pairs.items():
        factors = []
        for which in "AB":
            slots: list[list[Tensor]] = [[] for _ in range(placement.num_slots)]
            for part in sorted(every, key=lambda part: part.width):
                first_slot = placement.first_slots[part.experts]
                for i, factor in enumerate(part.tensors[f"{LORA}.{name}.lora_{which}"]):
                    slots[first_slot + i].append(factor)
            experts = [slots[copies[0]] for copies in placement.expert_slots]
            factors.append(torch.stack([_joined(layer, parts, name, which) for parts in experts]))
        a, b = factors
        pair = LoraPair((a.shape[0], b.shape[1], a.shape[2]), mine.rank, mine.alpha, device="meta")
        pair.lora_A, pair.lora_B = nn.Parameter(a), nn.Parameter(b)
        pairs[name] = pair
    return ExpertsLora(pairs)


def _joined(layer: ExpertsLayer, parts: list[Tensor], name: str, which: str) -> Tensor:
    """One expert's factor: that which the width divides is joined, the other one all have."""
    first = name == layer.first
    if first == (which == "A"):
        return parts[0]
    if not first:
        return torch.cat(parts, 1)
    if not layer.gated or layer.interleaved:
        return torch.cat(parts)
    halves = [values.chunk(2) for values in parts]
    return torch.cat([torch.cat([half[i] for half in halves]) for i in (0, 1)])
