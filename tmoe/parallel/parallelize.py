"""`parallelize`: spread the expert layers of a model over the ranks of a `DeviceMesh`, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..checks import expect, expect_type
from ..formats import QuantizedTensor
from ..formats.scheme import SCHEMES
from ..nn import Experts, MoE, SharedExpert
from .choose import EXCHANGES
from .expert_layers import ExpertsLayer, Share, expert_layers
from .expert_parallel import ExpertParallel
from .layout import OP, Dims, Layout
from .modules import ParallelExperts, ParallelMoE, ParallelSharedExpert
from .placement import Placement
from .shard import width_parts


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
        model: a `tmoe.MoE`, a `tmoe.Experts`, or any module that contains some; a model of
            transformers whose experts run on tmoe (`tmoe.replace_moe`), quantised or not.
        mesh: with names for its dimensions.
        tp: name or names of dimensions along which each expert's width is divided, and that of
            shared experts. Tokens are the same along them.
        ep: dimensions along which the experts are divided.
        dp: dimensions along which every rank has tokens of its own; along all others tokens must be
            the same. A dimension of both ep and dp exchanges tokens.
        placement: which rank of ep has which experts, for all layers or by the name of each; None:
            in order, as evenly as possible.
        exchange: "all_gather", "all_to_all" or "symmetric_memory"; None: for each call what should
            be fastest, see ``tmoe.explain(layer)``. A call that the one named can't do raises.
        sums: the dtype in which the last two bring partial sums back, float32 or bfloat16, which
            halves their bytes and rounds them once more. They are added up in float32. The
            all-gather path adds on the way, always in float32, and isn't chosen with bfloat16.

    Returns:
        `model`.

    Raises:
        ValueError: before anything is sent: a mesh, a placement or sizes that don't fit, a model
            without expert layers, one that is divided already or has experts that can't be (named,
            with the reason), weights whose scales a cut would go through, schemes whose inputs have
            one dynamic scale for all tokens.
    """
    divide(
        model, mesh, tp=tp, ep=ep, dp=dp, placement=placement, exchange=exchange, sums=sums
    )  # fmt: skip
    return model


def divide(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    tp: Dims,
    ep: Dims,
    dp: Dims,
    placement: Placement | Mapping[str, Placement] | None,
    exchange: str | None,
    sums: torch.dtype,
) -> dict[str, Share]:
    """`parallelize`; returns what this rank has of each layer."""
    expect_type(model, nn.Module, OP, "model")
    known = exchange is None or exchange in EXCHANGES
    expect(known, OP, "exchange", f"None or one of {', '.join(EXCHANGES)}", repr(exchange))
    both = (torch.float32, torch.bfloat16)
    expect(sums in both, OP, "sums", "torch.float32 or torch.bfloat16", sums)
    tp, ep, dp = _dims("tp", tp), _dims("ep", ep), _dims("dp", dp)
    sizes = Layout.sizes(mesh, tp, ep, dp)
    layers = expert_layers(model)
    if isinstance(placement, Mapping):
        unknown = sorted(set(placement) - set(layers))
        expect(not unknown, OP, "placement", f"for layers of {', '.join(layers)}", unknown)
    placements, parts, shares = {}, {}, {}
    for name, layer in layers.items():  # all checks come before the first change
        one = placement.get(name) if isinstance(placement, Mapping) else placement
        placements[name] = _placement(one, layer, sizes["ep"])
        parts[name] = _parts(layer, sizes["tp"])
    shared = [m for m in model.modules() if type(m) is SharedExpert and sizes["tp"] > 1]
    for shared_expert in shared:
        width_parts(shared_expert.down_proj.weight, sizes["tp"], gated_apart=False)
    layout = Layout.of(mesh, tp, ep, dp)  # makes process groups
    for name, layer in layers.items():
        words = layer.words
        held, part = placements[name].ranks[layout.experts.rank], parts[name][layout.width.rank]
        shares[name] = layer.share(held, part)
        layer.keep(shares[name])
        parallel = ExpertParallel(layout, placements[name], exchange, words, sums, part)
        if isinstance(layer.module, Experts):
            layer.module.__class__ = ParallelExperts
            layer.module.parallel = parallel  # type: ignore[assignment]
        else:
            from ..integrations.transformers.dividing import run_divided

            run_divided(model, name, parallel)
    for shared_expert in shared:
        _divide_shared(shared_expert, layout)
    for module in model.modules():
        if type(module) is MoE:
            module.__class__ = ParallelMoE
    return shares


def _dims(arg: str, given: Dims) -> tuple[str, ...] | None:
    if given is None or isinstance(given, str):
        return None if given is None else (given,)
    expect_type(given, Iterable, OP, arg)
    return tuple(given)


def _placement(given: Placement | None, layer: ExpertsLayer, ranks: int) -> Placement:
    E = layer.down_proj.shape[0]
    if given is None:
        expect(
            ranks <= E, OP, "ep", f"at most the {E} experts, or a placement with replicas", ranks
        )
        return Placement.contiguous(E, ranks)
    expect_type(given, Placement, OP, "placement")
    expect(given.num_experts == E, OP, "placement", f"of {E} experts", given.num_experts)
    expect(given.num_ranks == ranks, OP, "placement", f"of {ranks} ranks", given.num_ranks)
    return given


def _parts(layer: ExpertsLayer, ranks: int) -> list[tuple[int, int]]:
    """Each rank's part of the width; raises for what can't be divided."""
    scheme, down = layer.scheme, layer.down_proj
    if isinstance(down, QuantizedTensor):
        assert scheme is not None
        wanted = (
            f"with input_scale and hidden_scale for {scheme}: a dynamic scale is of the tokens of "
            "all ranks"
        )
        static = len(layer.static_scales) == 2
        expect(static or not SCHEMES[scheme].takes_scales, OP, "experts", wanted, "without")
    if ranks > 1:
        wanted = f"1 for {layer.name or 'the experts'}: {layer.whole_width}"
        expect(layer.whole_width is None, OP, "tp", wanted, ranks)
    return width_parts(down, ranks, gated_apart=layer.gated and not layer.interleaved)


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
