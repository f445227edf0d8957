"""Adapters of experts that several ranks share: begun alike, cut from whole ones, put together.

`tmoe.lora` asks for these where it meets experts that are divided. Each takes the experts' module.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..nn.lora import LORA, ExpertsLora, LoraPair
from .expert_layers import ExpertsLayer, Share, divided_layers
from .faults import next_number, said_by_all
from .groups import naming


def begin(module: nn.Module) -> None:
    """Fill new adapters so that copies of an expert, and ranks that divide its width, begin alike.
    A collective."""
    layer, parallel = _divided(module)
    everyone, seed = parallel.layout.everyone, int(torch.randint(1 << 62, ()))
    if everyone.handle is not None:
        number = f"adapters/{next_number(everyone.handle, 'adapters')}"
        said = said_by_all(
            everyone.handle, everyone.ranks, everyone.rank, number,
            f"beginning adapters of {parallel.words['layer']}", {"seed": seed},
        )  # fmt: skip
        seed = said[0]["seed"]
    share = _share(layer, parallel)
    for name, pair in layer.pairs.items():
        inputs = parallel.words["hidden_size" if name == layer.first else "intermediate_size"]
        bound = 1 / math.sqrt(inputs)
        experts = []
        for e in share.held:
            text = repr((seed, parallel.words["layer"], name, e)).encode()
            random = torch.Generator().manual_seed(int(hashlib.sha256(text).hexdigest()[:15], 16))
            experts.append((2 * torch.rand(pair.rank, inputs, generator=random) - 1) * bound)
        with torch.no_grad():
            pair.lora_A.copy_(share.cut(f"{LORA}.{name}.lora_A", torch.stack(experts)))


def own(module: nn.Module, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Of a projection's factors for all experts, (E, rank, D) and (E, N, rank), this rank's."""
    share = _share(*_divided(module))
    of = {"A": a, "B": b}
    return tuple(  # type: ignore[return-value]
        share.cut(f"{LORA}.{name}.lora_{which}", factor[list(share.held)])
        for which, factor in of.items()
    )


def whole(module: nn.Module) -> ExpertsLora | None:
    """Those of all experts, on the first of the ranks that share them; None on the others. A
    collective."""
    layer, parallel = _divided(module)
    everyone, mine = parallel.layout.everyone, Part.of(layer, parallel)
    every: list[Any] | None = [mine]
    if everyone.handle is not None:
        every = [None] * everyone.size if everyone.rank == 0 else None
        with naming(everyone, f"gathering the adapters of {parallel.words['layer']}"):
            dist.gather_object(mine, every, dst=everyone.ranks[0], group=everyone.handle)
    return None if every is None else _whole(layer, parallel, every)


class Part(NamedTuple):
    """What a rank has of a layer's adapters."""

    width: int  # its place among those that divide the width
    experts: int  # and among those that divide the experts
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, layer: ExpertsLayer, parallel: Any) -> Part:
        layout = parallel.layout
        tensors = {n: layer.module.get_parameter(n).detach().cpu() for n in layer.adapters}
        return cls(layout.width.rank, layout.experts.rank, tensors)


def _divided(module: nn.Module) -> tuple[ExpertsLayer, Any]:
    ((layer, parallel),) = divided_layers(module).values()
    return layer, parallel


def _share(layer: ExpertsLayer, parallel: Any) -> Share:
    held = parallel.placement.ranks[parallel.layout.experts.rank]
    I = parallel.words["intermediate_size"]
    return Share(layer, parallel.placement.num_experts, held, parallel.part, I)


def _whole(layer: ExpertsLayer, parallel: Any, every: list[Part]) -> ExpertsLora:
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
