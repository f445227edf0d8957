"""`parallelize`: spread the expert layers of a model over the ranks of a `DeviceMesh`, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..checks import expect, expect_type
from ..formats import QuantizedTensor
from ..formats.scheme import SCHEMES
from ..nn import Experts, MoE, SharedExpert
from .choose import EXCHANGES
from .expert_parallel import ExpertParallel
from .layout import OP, Dims, Layout
from .modules import ParallelExperts, ParallelMoE, ParallelSharedExpert
from .placement import Placement
from .shard import down_columns, first_rows, take_experts, whole, width_parts


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    tp: Dims = None,
    ep: Dims = None,
    dp: Dims = None,
    placement: Placement | Mapping[str, Placement] | None = None,
    exchange: str | None = None,
    sums: torch.dtype = torch.float32,
) -> nn.Module:
    """Give this rank its part of every expert layer of `model`, and make the layers work together.

        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("ep",))
        parallelize(model, mesh, ep="ep", dp="ep")  # each rank has tokens of its own

    In place, and for good: the other parts are let go. Everything else of the model stays as it is,
    on every rank. All ranks of the mesh call it; so they do the layers, also with zero tokens.

    Args:
        model: a `tmoe.MoE`, a `tmoe.Experts`, or any module that contains some.
        mesh: with names for its dimensions.
        tp: name or names of dimensions along which each expert's width is divided, and that of
            shared experts. Tokens are the same along them.
        ep: dimensions along which the experts are divided.
        dp: dimensions along which every rank has tokens of its own; along all others tokens must be
            the same. A dimension of both ep and dp exchanges tokens.
        placement: which rank of ep has which experts, for all layers or by the name of each; None:
            in order, as evenly as possible.
        exchange: "all_gather" or "all_to_all"; None: for each call what should be faster, see
            ``tmoe.explain(layer)``.
        sums: the dtype in which an all-to-all brings partial sums back, float32 or bfloat16, which
            halves their bytes and rounds them once more. They are added up in float32. The
            all-gather path adds on the way, always in float32, and isn't chosen with bfloat16.

    Returns:
        `model`.

    Raises:
        ValueError: before anything is sent: a mesh, a placement or sizes that don't fit, a model
            without expert layers or one that is divided already, weights whose scales a cut would
            go through, schemes whose inputs have one dynamic scale for all tokens.
    """
    expect_type(model, nn.Module, OP, "model")
    known = exchange is None or exchange in EXCHANGES
    expect(known, OP, "exchange", f"None or one of {', '.join(EXCHANGES)}", repr(exchange))
    both = (torch.float32, torch.bfloat16)
    expect(sums in both, OP, "sums", "torch.float32 or torch.bfloat16", sums)
    layout = Layout.of(mesh, tp, ep, dp)
    layers = _layers(model)
    if isinstance(placement, Mapping):
        unknown = sorted(set(placement) - set(layers))
        expect(not unknown, OP, "placement", f"for layers of {', '.join(layers)}", unknown)
    placements, parts = {}, {}
    for name, experts in layers.items():  # all checks come before the first change
        one = placement.get(name) if isinstance(placement, Mapping) else placement
        placements[name] = _placement(one, experts, layout)
        parts[name] = _parts(experts, layout)
    for module in model.modules():
        if type(module) is SharedExpert and layout.width.size > 1:
            width_parts(module.down_proj.weight, layout.width.size, gated_apart=False)
    for name, experts in layers.items():
        words = _words(experts, name)
        _divide(experts, name, layout, placements[name], parts[name])
        experts.parallel = ExpertParallel(layout, placements[name], exchange, words, sums)  # type: ignore
    for module in model.modules():
        if type(module) is SharedExpert and layout.width.size > 1:
            _divide_shared(module, layout)
        if type(module) is MoE:
            module.__class__ = ParallelMoE
    return model


def _layers(model: nn.Module) -> dict[str, Experts]:
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            plain = type(module) is Experts
            expect(plain, OP, "model", "not divided already", f"{type(module).__name__} {name!r}")
            layers[name] = module
    wanted = "one with a tmoe.MoE or tmoe.Experts in it"
    expect(bool(layers), OP, "model", wanted, type(model).__name__)
    return layers


def _placement(given: Placement | None, experts: Experts, layout: Layout) -> Placement:
    E, ranks = experts.num_experts, layout.experts.size
    if given is None:
        expect(
            ranks <= E, OP, "ep", f"at most the {E} experts, or a placement with replicas", ranks
        )
        return Placement.contiguous(E, ranks)
    expect_type(given, Placement, OP, "placement")
    expect(given.num_experts == E, OP, "placement", f"of {E} experts", given.num_experts)
    expect(given.num_ranks == ranks, OP, "placement", f"of {ranks} ranks", given.num_ranks)
    return given


def _parts(experts: Experts, layout: Layout) -> list[tuple[int, int]]:
    """Each rank's part of the width; raises for what can't be divided."""
    scheme, down = experts.scheme, experts.down_proj
    if isinstance(down, QuantizedTensor):
        assert scheme is not None
        static = experts.input_scale is not None and experts.hidden_scale is not None
        wanted = (
            f"with input_scale and hidden_scale for {scheme}: a dynamic scale is of the tokens of "
            "all ranks"
        )
        expect(static or not SCHEMES[scheme].takes_scales, OP, "experts", wanted, "without")
    apart = experts.activation.gated and not experts.interleaved
    return width_parts(down, layout.width.size, gated_apart=apart)


def _divide(
    experts: Experts,
    name: str,
    layout: Layout,
    placement: Placement,
    parts: list[tuple[int, int]],
) -> None:
    I, part = experts.intermediate_size, parts[layout.width.rank]
    held = placement.ranks[layout.experts.rank]
    first = experts._first
    for arg in (first, f"{first}_bias", "down_proj", "down_proj_bias"):
        weight = getattr(experts, arg)
        if weight is None:
            continue
        mine = take_experts(weight.detach(), held)
        if arg.startswith(first):
            mine = first_rows(
                mine, part, I,
                gated=experts.activation.gated, interleaved=experts.interleaved,
            )  # fmt: skip
        elif arg == "down_proj":
            mine = down_columns(mine, part)
        setattr(experts, arg, nn.Parameter(whole(mine), requires_grad=weight.requires_grad))
    for arg in ("input_scale", "hidden_scale"):
        scale = getattr(experts, arg)
        if scale is not None and scale.numel() > 1:
            setattr(experts, arg, take_experts(scale, held))
    experts.__class__ = ParallelExperts


def _words(experts: Experts, name: str) -> dict[str, Any]:
    return {
        "layer": name or type(experts).__name__,
        "experts": experts.num_experts,
        "hidden_size": experts.hidden_size,
        "intermediate_size": experts.intermediate_size,
        "scheme": experts.scheme,
        "dtype": str(experts.down_proj.dtype).removeprefix("torch."),
        "activation": str(experts.activation),
        "bias": experts.down_proj_bias is not None,
    }


def _divide_shared(shared: SharedExpert, layout: Layout) -> None:
    down = shared.down_proj.weight
    start, end = width_parts(down, layout.width.size, gated_apart=False)[layout.width.rank]
    for name in ("gate_proj", "up_proj", "down_proj"):
        linear = getattr(shared, name, None)
        if linear is None:
            continue
        weight: Tensor = linear.weight.detach()
        mine = weight[:, start:end] if name == "down_proj" else weight[start:end]
        linear.weight = nn.Parameter(mine.clone(), requires_grad=linear.weight.requires_grad)
        linear.out_features, linear.in_features = mine.shape
    shared.__class__ = ParallelSharedExpert
    shared.group = layout.width  # type: ignore[assignment]
