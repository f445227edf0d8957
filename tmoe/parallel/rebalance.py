"""`rebalance`: give the expert layers of a model other placements, while the model is in use.

    loads = load.all_reduce()                             # of each router, see tmoe.watch_load
    new = balance(loads, 8, redundant=2, current=layer.experts.parallel.placement)
    rebalance(model, {"layers.3.mlp.experts": new})       # on all ranks, between two steps

Layer by layer, each whole or not at all. Weights stay where they are in memory, with other experts
in them; what is computed from them elsewhere (layouts that `tmoe.prepare` made) is dropped, and a
warning says so at the next call. A CUDA graph has the routes of the old placement in it: a layer
that was captured isn't moved unless the caller promises to capture anew.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..checks import expect, expect_type
from .expert_layers import ExpertsLayer, divided_layers
from .expert_parallel import ExpertParallel
from .placement import Placement
from .rebalance_moves import Moves
from .rebalance_transfer import move_experts

OP = "rebalance"


def rebalance(
    model: nn.Module,
    placement: Placement | Mapping[str, Placement],
    *,
    max_extra_bytes: int | None = None,
    captured_anew: bool = False,
) -> dict[str, Moves]:
    """Move experts between the ranks of layers that `parallelize` made. A collective call.

    Args:
        model: has the layers, or is one.
        placement: the new one, for all layers or by the names of some; with as many slots on each
            rank as the layer has now.
        max_extra_bytes: refuse to set aside more than that on any rank; None: what it takes.
        captured_anew: CUDA graphs that contain these layers aren't replayed any more.

    Returns for each layer what was moved. Layers that come before one that fails have their new
    placement, on all ranks; that one and those after it have the old one.

    Raises:
        ValueError: on all ranks: no such layers, a placement that doesn't fit, a layer in training
            (its optimizer's state would stay with the wrong experts), one that was captured, too
            little memory allowed. RankMismatchError: ranks want different things. RankLostError: a
            rank is gone. RuntimeError: a rank has no memory left.
    """
    expect_type(model, nn.Module, OP, "model")
    layers = divided_layers(model)
    expect(bool(layers), OP, "model", "one with layers that parallelize made", type(model).__name__)
    wanted = placement if isinstance(placement, Mapping) else dict.fromkeys(layers, placement)
    unknown = sorted(set(wanted) - set(layers))
    expect(not unknown, OP, "placement", f"for layers of {', '.join(layers)}", unknown)
    found = {}
    for name, layer in layers.items():
        if name in wanted:
            found[name] = _rebalance(*layer, wanted[name], max_extra_bytes, captured_anew)
    return found


def _rebalance(
    layer: ExpertsLayer,
    parallel: ExpertParallel,
    new: Placement,
    max_extra_bytes: int | None,
    captured_anew: bool,
) -> Moves:
    layout = parallel.layout
    moves = move_experts(
        slots_of_layer(layer), parallel.placement, new,
        group=layout.experts, everyone=layout.everyone, max_extra_bytes=max_extra_bytes,
        name=layer.words["layer"], problem=_why_not(layer, parallel, captured_anew),
    )  # fmt: skip
    parallel.set_placement(new)
    return moves


def slots_of_layer(layer: ExpertsLayer) -> dict[str, Tensor]:
    """What belongs to single experts, one for each slot of this rank."""
    names = (*layer.tensors, *layer.adapters)
    weights = {name: layer.module.get_parameter(name).detach() for name in names}
    scales = {name: scale for name, scale in layer.static_scales.items() if scale.numel() > 1}
    return weights | scales


def _why_not(layer: ExpertsLayer, parallel: ExpertParallel, captured_anew: bool) -> str | None:
    trained = [
        name
        for name, parameter in layer.module.named_parameters()
        if parameter.grad is not None or (layer.module.training and parameter.requires_grad)
    ]
    if trained:
        return (
            f"{', '.join(trained)} are in training: an optimizer's state would stay with other "
            "experts; call .eval() and zero_grad() first, or requires_grad_(False)"
        )
    if parallel.captured and not captured_anew:
        return (
            "it was captured in a CUDA graph, which has the old routes in it; drop the graph and "
            "say captured_anew=True"
        )
    return None
