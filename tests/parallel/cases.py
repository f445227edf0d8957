"""Layers on several ranks, side by side with the same layer on one."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tmoe
from tests.checking import assert_matches
from tmoe.bench.reference import quantized_experts_ref
from tmoe.formats import SCHEMES
from tmoe.parallel import Placement, fixed_tokens, parallelize


@dataclass(frozen=True)
class Case:
    """A layer and how it is spread. `tokens`: of each rank with tokens of its own."""

    why: str
    mesh: tuple[int, ...]
    dims: tuple[str, ...]
    tokens: tuple[int, ...]
    tp: Any = None
    ep: Any = None
    dp: Any = None
    experts: int = 6
    top_k: int = 2
    hidden: int = 16
    intermediate: int = 12
    exchange: str | None = None
    placement: tuple[tuple[int, ...], ...] | None = None
    layer: dict[str, Any] = field(default_factory=dict)
    routing: str = "Renormalize"
    numbers: dict[str, Any] = field(default_factory=dict)  # of the routing
    dtype: torch.dtype = torch.float32
    fixed: Any = False  # or the capacity
    backend: str | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    scheme: str | None = None
    of_experts: bool = False  # static scales, one for each expert
    all_to: int | None = None  # every token goes to this expert
    grads: bool = True

    @property
    def hidden_scales_differ(self) -> bool:
        """Whether a part of a hidden row has another scale than the whole row."""
        return self.tp is not None and self.scheme == "fp8_channel"

    @property
    def size(self) -> int:
        size = 1
        for n in self.mesh:
            size *= n
        return size


_meshes: dict[Any, Any] = {}


def device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def mesh_of(case: Case) -> Any:
    """Made once: every mesh makes process groups."""
    key = (case.mesh, case.dims)
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device().type, case.mesh, mesh_dim_names=case.dims)
    return _meshes[key]


def make_layer(case: Case) -> tmoe.MoE:
    torch.manual_seed(1)
    routing = tmoe.Routing(case.experts, case.top_k, case.routing, **case.numbers)
    layer = tmoe.MoE(case.hidden, case.intermediate, routing, **case.layer)
    for p in layer.parameters():  # so that every factor shows
        p.data.mul_(3)
    return layer.to(device(), case.dtype)


def make_whole(case: Case) -> tmoe.MoE:
    """Quantised if the case says so; with static scales where a scheme takes them."""
    layer = make_layer(case)
    if case.scheme is None:
        return layer
    scales = {}
    if SCHEMES[case.scheme].takes_scales:
        most = 6 * 448 if case.scheme == "nvfp4" else 448
        scales = {"input_scale": torch.tensor(5 / most), "hidden_scale": torch.tensor(20 / most)}
        if case.of_experts:
            scales["input_scale"] = torch.linspace(0.5, 1.5, case.experts) * 5 / most
    layer.requires_grad_(False)
    return tmoe.MoE.quantized(layer, case.scheme, **scales)


def true_output(case: Case, whole: tmoe.MoE, x: Tensor, ids: Tensor | None) -> Tensor:
    """In float64."""
    if case.scheme is None:
        return copy.deepcopy(whole).double()(x.double(), ids)
    _, weights, ids = whole.gate(x, ids)
    experts = whole.experts
    return quantized_experts_ref(
        x,
        experts.gate_up_proj.dequantize(),
        experts.down_proj.dequantize(),
        weights,
        ids.long(),
        # Scales of parts of a row aren't a row's: then nearness to unrounded rows has to do.
        "fp8_a16" if case.hidden_scales_differ else case.scheme,
        input_scale=experts.input_scale,
        hidden_scale=experts.hidden_scale,
    )


def spread(case: Case, layer: tmoe.MoE) -> tmoe.MoE:
    placement = None if case.placement is None else Placement(case.experts, case.placement)
    return parallelize(
        layer, mesh_of(case), tp=case.tp, ep=case.ep, dp=case.dp, placement=placement,
        exchange=case.exchange,
    )  # fmt: skip


def tokens_of(case: Case) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(n, case.hidden).to(device(), case.dtype) for n in case.tokens]


def run(rank: int, case: Case) -> dict[str, Any]:
    """Compare a layer on this rank with the whole one; returns what only all ranks can judge."""
    whole, layer = make_whole(case), spread(case, make_whole(case))
    owner = layer.experts.parallel.layout.owners.rank
    all_x, bounds = tokens_of(case), [0]
    for x in all_x:
        bounds.append(bounds[-1] + len(x))
    mine = slice(bounds[owner], bounds[owner + 1])
    x_all = torch.cat(all_x).requires_grad_(case.grads)
    x = all_x[owner].clone().requires_grad_(case.grads)
    ids = None
    if case.all_to is not None:
        ids = torch.full((len(x_all), case.top_k), case.all_to)
        ids[:, 1:] = (
            torch.arange(len(x_all))[:, None] + torch.arange(case.top_k - 1) + 1
        ) % case.experts
        ids = ids.to(device())

    options = {"backend": case.backend, "deterministic": case.deterministic}
    with torch.set_grad_enabled(case.grads):
        truth = None if case.of_experts else true_output(case, whole, x_all, ids)
        with tmoe.options(**options, batch_invariant=case.batch_invariant):
            one = whole(x_all, ids)
            if case.fixed is False:
                y = layer(x, None if ids is None else ids[mine])
            else:
                with fixed_tokens(None if case.fixed is True else case.fixed):
                    y = layer(x, None if ids is None else ids[mine])
    assert y.dtype == x.dtype and y.shape == x.shape
    if truth is not None:
        assert_matches(y.detach(), truth[mine].detach(), one[mine].detach())
    if not case.hidden_scales_differ:  # summation order is all that may differ
        assert_matches(y.detach(), one[mine].detach().double(), one[mine].detach())
    same_bits = torch.equal(y, one[mine])
    if case.grads:
        torch.manual_seed(3)
        dy = torch.randn(x_all.shape).to(device(), case.dtype)
        whole_d = copy.deepcopy(whole).double()
        x_d = x_all.detach().double().requires_grad_()
        whole_d(x_d, ids).backward(dy.double())
        one.backward(dy)
        y.backward(dy[mine])
        assert_matches(x.grad, x_d.grad[mine], x_all.grad[mine])
        compare_gradients(layer, whole, whole_d, case)
    return {"same_bits": same_bits, "exchange": layer.experts.parallel.exchange}


def compare_gradients(layer: tmoe.MoE, whole: tmoe.MoE, whole_d: tmoe.MoE, case: Case) -> None:
    """A part's gradient is the part of the gradient; the router's is the sum over own tokens."""
    layout, experts = layer.experts.parallel.layout, layer.experts
    held = list(experts.parallel.placement.ranks[layout.experts.rank])
    parts = [slice(*part) for part in _parts(layer, whole)]
    part = parts[layout.width.rank]
    I = case.intermediate
    for name in (experts._first, f"{experts._first}_bias", "down_proj", "down_proj_bias"):
        mine = getattr(experts, name)
        if mine is None:
            continue
        both = []
        for model in (whole_d, whole):
            grad = getattr(model.experts, name).grad[held]
            if name == "down_proj":
                grad = grad[..., part]
            elif name.startswith(experts._first):
                if not experts.activation.gated:
                    grad = grad[:, part]
                elif experts.interleaved:
                    grad = grad[:, 2 * part.start : 2 * part.stop]
                else:
                    grad = torch.cat([grad[:, part], grad[:, I:][:, part]], 1)
            both.append(grad)
        assert_matches(mine.grad, *both)
    router = layer.gate.weight.grad.clone()
    if layout.owners.size > 1:
        dist.all_reduce(router, group=layout.owners.handle)
    assert_matches(router, whole_d.gate.weight.grad, whole.gate.weight.grad)


def _parts(layer: tmoe.MoE, whole: tmoe.MoE) -> list[tuple[int, int]]:
    from tmoe.parallel.shard import width_parts

    apart = layer.experts.activation.gated and not layer.experts.interleaved
    width = layer.experts.parallel.layout.width.size
    return width_parts(whole.experts.down_proj, width, gated_apart=apart)
