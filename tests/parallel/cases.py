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
    dtype: torch.dtype = torch.float32
    fixed: Any = False  # or the capacity
    backend: str | None = None
    deterministic: bool = False
    all_to: int | None = None  # every token goes to this expert
    grads: bool = True

    @property
    def size(self) -> int:
        size = 1
        for n in self.mesh:
            size *= n
        return size


_meshes: dict[Any, Any] = {}


def mesh_of(case: Case) -> Any:
    """Made once: every mesh makes process groups."""
    key = (case.mesh, case.dims)
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", case.mesh, mesh_dim_names=case.dims)
    return _meshes[key]


def make_layer(case: Case) -> tmoe.MoE:
    torch.manual_seed(1)
    routing = tmoe.Routing(case.experts, case.top_k, case.routing)
    layer = tmoe.MoE(case.hidden, case.intermediate, routing, **case.layer)
    for p in layer.parameters():  # so that every factor shows
        p.data.mul_(3)
    return layer.to(case.dtype)


def spread(case: Case, layer: tmoe.MoE) -> tmoe.MoE:
    placement = None if case.placement is None else Placement(case.experts, case.placement)
    return parallelize(
        layer, mesh_of(case), tp=case.tp, ep=case.ep, dp=case.dp, placement=placement,
        exchange=case.exchange,
    )  # fmt: skip


def tokens_of(case: Case) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(n, case.hidden).to(case.dtype) for n in case.tokens]


def run(rank: int, case: Case) -> dict[str, Any]:
    """Compare a layer on this rank with the whole one; returns what only all ranks can judge."""
    whole, layer = make_layer(case), spread(case, make_layer(case))
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

    options = {"backend": case.backend, "deterministic": case.deterministic}
    with torch.set_grad_enabled(case.grads):
        truth = copy.deepcopy(whole).double()(x_all.double(), ids)
        with tmoe.options(**options, batch_invariant=case.backend == "triton"):
            one = whole(x_all, ids)
            if case.fixed is False:
                y = layer(x, None if ids is None else ids[mine])
            else:
                with fixed_tokens(None if case.fixed is True else case.fixed):
                    y = layer(x, None if ids is None else ids[mine])
    assert y.dtype == x.dtype and y.shape == x.shape
    assert_matches(y.detach(), truth[mine].detach(), one[mine].detach())
    same_bits = torch.equal(y, one[mine])
    if case.grads:
        torch.manual_seed(3)
        dy = torch.randn(x_all.shape).to(case.dtype)
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
