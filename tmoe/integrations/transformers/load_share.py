"""Of a checkpoint's experts, read what one rank holds.

The model is divided while it is on the meta device, after every name and shape of the checkpoint
was checked; then what was planned for the experts is exchanged for what reads a share of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from tmoe.checks import expect
from tmoe.formats import QuantizedTensor

if TYPE_CHECKING:
    from .checkpoint_loading import CheckpointLoading
    from .checkpoint_names import Destinations

_NUMBER = re.compile(r"(.*\.)(\d+)(\.\w+\.weight)$")


class Share(Protocol):
    """A rank's part of a layer's experts: `tmoe.parallel.expert_layers.Share`."""

    @property
    def layer(self) -> Any: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def held(self) -> tuple[int, ...]: ...
    @property
    def whole_width(self) -> bool: ...
    def of_all(self, name: str, weight: Tensor) -> Tensor: ...
    def of_one(self, name: str, matrix: Tensor) -> Tensor: ...
    def cut(self, name: str, weight: Tensor) -> Tensor: ...


Divide = Callable[[nn.Module], Mapping[str, Any]]


def plan_shares(
    loading: CheckpointLoading, shares: Mapping[str, Share], places: Destinations, op: str
) -> None:
    """Let `loading` read the shares of the layers that they are named for."""
    for name, share in shares.items():
        if name in loading.stored:
            _plan_stored(loading, name, share)
    owners = {
        f"{name}.{tensor}": (share, tensor)
        for name, share in shares.items()
        for tensor in share.layer.tensors
    }
    renamed: dict[str, Any] = {}  # apart, since new names may be those of others
    for source in places.plain:
        target = places.destination(source)
        if target in owners:
            steps = [type(step).__name__ for step in places.steps(source)]
            renamed |= _plan_plain(loading, source, *owners[target], steps, op)
    _expect_all(owners, places, op)
    loading.state_dict |= renamed


def _expect_all(owners: Mapping[str, tuple[Share, str]], places: Destinations, op: str) -> None:
    """Raise on every rank for an expert that isn't there, whoever was to hold it."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for source in places.plain:
        target, found = places.destination(source), _NUMBER.match(source)
        if target in owners and found is not None:
            numbers.setdefault((target, f"{found[1]}*{found[3]}"), set()).add(int(found[2]))
    for (target, names), there in numbers.items():
        E = owners[target][0].num_experts
        absent = [e for e in range(E) if e not in there]
        expect(not absent, op, names, f"of experts 0 to {E - 1}", f"none of {absent[:8]}")


def _plan_stored(loading: CheckpointLoading, name: str, share: Share) -> None:
    """Quantised experts: those held, whole, then the part of their width."""
    stored, held = loading.stored[name], share.held
    mine = replace(
        stored,
        first=tuple(stored.first[e] for e in held),
        down=tuple(stored.down[e] for e in held),
        experts=held,
    )
    reads = {share.layer.first: mine.read_first, share.layer.down: mine.read_down}

    def read(tensor: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        weight = share.cut(tensor, reads[tensor](device, dtype))
        if isinstance(weight, QuantizedTensor) and not share.whole_width:
            weight = weight._with_parts([part.contiguous() for part in weight.parts()])
        return weight

    loading.plan_stored(name, mine, {tensor: partial(read, tensor) for tensor in reads})


def _plan_plain(
    loading: CheckpointLoading, source: str, share: Share, tensor: str, steps: list[str], op: str
) -> dict[str, Any]:
    """A tensor of all experts, or of one, which has another number among those of this rank. What
    transformers makes of them (`steps`) it makes of the share."""
    found, one_by_one = _NUMBER.match(source), "MergeModulelist" in steps
    if one_by_one:
        known = found is not None and set(steps) <= {"MergeModulelist", "Concatenate"}
    else:  # the way of a transposed file is found by sizes, which must be the model's
        known = not steps or (steps == ["Transpose"] and share.whole_width)
    wanted = "stored for each expert alone, or as the model has them, to be divided while loading"
    got = f"{', '.join(steps) or 'another way'}; parallelize the model after it was loaded"
    expect(known, op, source, wanted, got)
    del loading.state_dict[source]
    if found is None or not one_by_one:
        return {source: loading.of_view(source, partial(share.of_all, tensor))}
    expert = int(found[2])
    if expert not in share.held:
        return {}
    here = f"{found[1]}{share.held.index(expert)}{found[3]}"
    return {here: loading.of_view(source, partial(share.of_one, tensor))}
