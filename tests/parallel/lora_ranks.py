"""Adapters on experts that ranks share; each function runs on every rank."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tmoe
from tests.checking import assert_matches
from tests.parallel import model_ranks
from tests.parallel.cases import Case, device, make_whole, spread, tokens_of
from tests.parallel.wire_ranks import Sent
from tmoe.parallel import Placement, parallelize, rebalance
from tmoe.parallel.expert_layers import ExpertsLayer, Share, divided_layers
from tmoe.parallel.shard import width_parts


def adapted(case: Case) -> tmoe.MoE:
    """Frozen, with adapters that change something."""
    layer = make_whole(case).requires_grad_(False)
    tmoe.lora.add(layer, rank=4, alpha=6)
    torch.manual_seed(4)
    for name, parameter in layer.named_parameters():
        if "lora" in name:
            parameter.data = (torch.randn(parameter.shape) / 4).to(device())
    return layer


def grads_of_one(whole: tmoe.MoE, tokens: list[torch.Tensor]) -> None:
    for x in tokens:
        whole(x).float().square().sum().backward()


def trained(rank: int, case: Case, folder: str) -> None:
    """Output and gradients of each rank's adapters, and what is saved of all of them."""
    whole = adapted(case)
    layer = spread(case, copy.deepcopy(whole))
    torch.manual_seed(2)
    tokens = [torch.randn(n, case.hidden).to(device()) for n in case.tokens]
    x = tokens[layer.experts.parallel.layout.owners.rank]
    with tmoe.options(backend=case.backend):
        y = layer(x)
        one, true = whole(x).detach(), None
        if case.scheme is None:
            true = copy.deepcopy(whole).double()
            assert_matches(y.detach(), true(x.double()).detach(), one)
            grads_of_one(true, [t.double() for t in tokens])
        else:  # the order of a sum is all that differs
            assert_matches(y.detach(), one.double(), one)
        y.square().sum().backward()
        grads_of_one(whole, tokens)
    share = Share(layer_of(layer), case.experts, held(layer), part(layer), case.intermediate)
    for name in share.layer.adapters:
        mine = layer.experts.get_parameter(name)
        assert mine.grad is not None and mine.grad.abs().sum() > 0
        usual = share.of_all(name, whole.experts.get_parameter(name).grad)
        wanted = usual.double()
        if true is not None:
            wanted = share.of_all(name, true.experts.get_parameter(name).grad)
        assert_matches(mine.grad, wanted, usual)
    for model in (whole, layer):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.mul_(3)
    tmoe.lora.save(layer, Path(folder) / "divided")
    if rank == 0:
        tmoe.lora.save(whole, Path(folder) / "whole")


def layer_of(model: nn.Module) -> ExpertsLayer:
    ((found, _),) = divided_layers(model).values()
    return found


def held(layer: tmoe.MoE) -> tuple[int, ...]:
    parallel = layer.experts.parallel
    return parallel.placement.ranks[parallel.layout.experts.rank]


def part(layer: tmoe.MoE) -> tuple[int, int]:
    width = layer.experts.parallel.layout.width
    down = torch.empty(1, 1, layer.experts.intermediate_size)
    return width_parts(down, width.size, gated_apart=False)[width.rank]


@torch.no_grad()
def moved(rank: int) -> None:
    """Adapters go with their experts."""
    case = Case("", (2,), ("x",), (4, 3), ep="x", dp="x", grads=False)
    whole = adapted(case)
    layer = spread(case, copy.deepcopy(whole)).eval()
    x = torch.randn(4 - rank, case.hidden)
    moves = rebalance(layer, Placement(6, ((5, 1, 3), (0, 2, 4))))
    assert moves["experts"].sent == 4
    torch.testing.assert_close(layer(x), whole(x))
    tmoe.lora.merge(layer)
    torch.testing.assert_close(layer(x), whole(x))


@torch.no_grad()
def afterwards(rank: int, case: Case, folder: str) -> None:
    """Adapters for experts that are divided already: new ones, saved, and read again by others."""
    whole, layer = make_whole(case).requires_grad_(False), make_whole(case).requires_grad_(False)
    spread(case, layer)
    tmoe.lora.add(layer, rank=4, alpha=6)
    x = tokens_of(case)[layer.experts.parallel.layout.owners.rank]
    torch.testing.assert_close(layer(x), whole(x))  # they begin with nothing
    for pair in layer.experts.lora.children():
        assert pair.lora_A.abs().max() > 0 and pair.lora_A.abs().max() <= 12**-0.5
    tmoe.lora.save(layer, Path(folder) / "new")
    dist.barrier()
    tmoe.lora.load(whole, Path(folder) / "new")
    for name, parameter in whole.named_parameters():
        if name.endswith("lora_B"):
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
            )
    if rank == 0:
        tmoe.lora.save(whole, Path(folder) / "whole")
    dist.barrier()
    tmoe.lora.remove(layer)
    tmoe.lora.load(layer, Path(folder) / "whole")
    torch.testing.assert_close(layer(x), whole(x))
    tmoe.lora.save(layer, Path(folder) / "divided")


def refused(rank: int) -> str:
    case = Case("", (2,), ("x",), (4, 3), ep="x", dp="x")
    try:
        tmoe.lora.save(spread(case, make_whole(case)), "nowhere")
    except ValueError as error:
        return str(error)
    return ""


@torch.no_grad()
def of_a_model(rank: int, name: str) -> None:
    """transformers' experts: the same logits, from a part of the adapters."""
    model = model_ranks.build(name)
    tmoe.replace_moe(model)
    tmoe.lora.add(model.requires_grad_(False), rank=2)
    torch.manual_seed(4)
    for parameter in (p for n, p in model.named_parameters() if "lora" in n):
        parameter.copy_(torch.randn(parameter.shape) / 4)
    plain = model_ranks.said(model, model_ranks.prompt())[1]
    parallelize(model, model_ranks.world(), ep="x")
    torch.testing.assert_close(model_ranks.said(model, model_ranks.prompt())[1], plain)


@torch.no_grad()
def coded_model(rank: int) -> tuple[int, int]:
    """Bytes of tokens that a quantised model of transformers sends, and a plain one."""
    found = []
    for scheme in ("fp8_channel", None):
        model = model_ranks.build("qwen3_moe")
        tmoe.replace_moe(model, scheme, progress=False)
        ids = model_ranks.prompt(5 + rank, 6)
        before = model(ids).logits
        parallelize(model, model_ranks.world(), ep="x", dp="x", exchange="all_gather")
        with Sent() as sent:
            after = model(ids).logits
        torch.testing.assert_close(after, before)
        found.append(sent.gathered)
    return found[0], found[1]
