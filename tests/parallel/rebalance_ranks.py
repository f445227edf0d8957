"""What the ranks of `test_rebalance.py` do; each function runs on every rank."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tmoe
from tests.live_bytes import LiveBytes
from tmoe.parallel import Placement, balance, parallelize, rebalance, rebalance_transfer
from tmoe.parallel.groups import Group
from tmoe.parallel.rebalance_moves import plan_moves
from tmoe.parallel.rebalance_transfer import extra_bytes, move_experts

E, K, H, I = 10, 2, 64, 32
SCHEMES = ("fp8_block", "nvfp4", "mxfp4", "fp8_tensor")


def loads(kind: str) -> list[float]:
    return [1.0] * E if kind == "even" else [1000 / (1 + e) ** 1.2 for e in range(E)]


def placements(ranks: int, redundant: int = 1) -> tuple[Placement, Placement]:
    """Of even loads, and of skewed ones."""
    old, new = (balance(loads(kind), ranks, redundant=redundant) for kind in ("even", "zipf"))
    return old, new


def world() -> Group:
    return Group.of(dist.group.WORLD, "cpu")


def all_experts(kind: str) -> dict[str, torch.Tensor]:
    """Of all E, the same on every rank."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(E, *shape, generator=random)

    gate_up, down = normal(2 * I, H), normal(H, I)
    if kind in SCHEMES:
        gate_up, down = (tmoe.quantize(w, kind) for w in (gate_up, down))
    elif kind == "bf16":
        gate_up, down = gate_up.bfloat16(), down.bfloat16()
    return {
        "gate_up_proj": gate_up, "down_proj": down, "down_proj_bias": normal(H),
        "input_scale": normal(),
    }  # fmt: skip


def slots_of(kind: str, own: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Those of a rank, as a layer holds them."""
    experts = {name: tensor[list(own)] for name, tensor in all_experts(kind).items()}
    if kind == "transposed":
        gate_up = experts["gate_up_proj"]
        experts["gate_up_proj"] = gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "inference":
        with torch.inference_mode():
            experts = {name: tensor.clone() for name, tensor in experts.items()}
    return experts


def parts_of(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [
        part
        for tensor in tensors.values()
        for part in (tensor.parts() if isinstance(tensor, tmoe.QuantizedTensor) else [tensor])
    ]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""

    def bits(part: torch.Tensor) -> torch.Tensor:
        return part.contiguous().view(torch.uint8)

    pairs = zip(parts_of(a), parts_of(b), strict=True)
    return all(x.dtype == y.dtype and torch.equal(bits(x), bits(y)) for x, y in pairs)


def move(rank: int, kind: str) -> dict[str, Any]:
    """There and back again."""
    old, new = placements(dist.get_world_size())
    tensors = slots_of(kind, old.ranks[rank])
    places = [part.data_ptr() for part in parts_of(tensors)]
    allowed = extra_bytes(tensors, plan_moves(old, new), rank)
    with LiveBytes(parts_of(tensors)) as memory:
        moves = move_experts(tensors, old, new, group=world(), max_extra_bytes=allowed)
    found = {
        "right": same(tensors, slots_of(kind, new.ranks[rank])),
        "in place": places == [part.data_ptr() for part in parts_of(tensors)],
        "moved": len(moves.into(rank)), "memory": (memory.most, allowed),
    }  # fmt: skip
    move_experts(tensors, new, old, group=world())
    return found | {"right again": same(tensors, slots_of(kind, old.ranks[rank]))}


def refused(rank: int, name: str) -> tuple[str, str, bool]:
    """Kind and words of the error if rank 2 has something else, and whether all stays."""
    old, new = placements(dist.get_world_size())
    tensors, options = slots_of("fp32", old.ranks[rank]), {}
    set_aside = rebalance_transfer._set_aside
    if name == "another number of ranks":
        old = new = Placement.contiguous(E, 3)
    elif rank == 2:
        if name == "another placement":
            new = Placement(E, (*new.ranks[:3], tuple(reversed(new.ranks[3]))))
        elif name == "another layer":
            options["name"] = "layers.4"
        elif name == "another dtype":
            tensors["down_proj"] = tensors["down_proj"].bfloat16()
        elif name == "another size":
            tensors["down_proj"] = tensors["down_proj"][:, :, :16]
        elif name == "fewer slots":
            tensors["down_proj"] = tensors["down_proj"][:-1]
        elif name == "too little memory":
            options["max_extra_bytes"] = extra_bytes(tensors, plan_moves(old, new), rank) - 1
        elif name == "no memory":

            def fail(*arguments: object) -> list[torch.Tensor]:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

            rebalance_transfer._set_aside = fail
    untouched = {key: value.clone() for key, value in tensors.items()}
    try:
        move_experts(tensors, old, new, group=world(), **options)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error), same(tensors, untouched)
    finally:
        rebalance_transfer._set_aside = set_aside
    return "nothing", "", False


def subgroup(rank: int) -> Any:
    """Ranks 1 and 3 of four are a group of their own; the others do nothing."""
    handle = dist.new_group([1, 3])
    if rank in (0, 2):
        return None
    old = Placement.contiguous(E, 2)
    new = Placement(E, tuple(reversed(old.ranks)))
    group = Group.of(handle, "cpu")
    tensors = slots_of("fp32", old.ranks[group.rank])
    move_experts(tensors, old, new, group=group)
    return same(tensors, slots_of("fp32", new.ranks[group.rank]))


def lose_a_rank(rank: int, when: str) -> Any:
    """Of two; rank 1 ends before it says anything, or when experts are about to be exchanged."""
    old = Placement(E, (tuple(range(0, E, 2)), tuple(range(1, E, 2))))
    new = Placement.contiguous(E, 2)
    tensors = slots_of("fp32", old.ranks[rank])
    if rank == 1:
        if when == "before":
            os._exit(1)
        rebalance_transfer._exchange = lambda *_: os._exit(1)
    try:
        move_experts(tensors, old, new, group=world(), name="layers.7")
    except RuntimeError as error:
        return type(error).__name__, str(error), same(tensors, slots_of("fp32", old.ranks[rank]))
    return "no error", "", False


def layer(scheme: str | None = None) -> tmoe.MoE:
    torch.manual_seed(1)
    made = tmoe.MoE(H, I, tmoe.Routing(E, K, "Renormalize"), bias=scheme is None)
    for parameter in made.parameters():  # so that every factor shows
        parameter.data.mul_(3)
    return made if scheme is None else tmoe.MoE.quantized(made, scheme)


def tokens(rank: int) -> torch.Tensor:
    """Uneven, and skewed towards what the router likes."""
    torch.manual_seed(10 + rank)
    return torch.randn(6 + 5 * rank, H) + torch.randn(H, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def model(rank: int, shape: tuple[int, ...], exchange: str, scheme: str | None) -> dict[str, Any]:
    """A layer before it is rebalanced, after, and the whole one on this rank."""
    names = ("e", "t")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    old, new = placements(shape[0])
    whole = layer(scheme).eval()
    spread = parallelize(
        torch.nn.Sequential(layer(scheme).eval()), mesh, ep="e", dp="e", placement=old,
        tp="t" if len(shape) > 1 else None, exchange=exchange,
    )  # fmt: skip
    x = tokens(rank // shape[1] if len(shape) > 1 else rank)
    before = spread(x)
    moves = rebalance(spread, {"0.experts": new})["0.experts"]
    after = spread(x)
    return {
        "sent": moves.sent, "whole": whole(x), "truth": layer(scheme).eval().double()(x.double())
        if scheme is None else None, "before": before, "after": after,
        "placement": spread[0].experts.parallel.placement == new,
    }  # fmt: skip


def not_now(rank: int, why: str) -> str:
    """What `rebalance` says to a layer in training, or captured, on rank 1 alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("e",))
    old, new = placements(dist.get_world_size())
    spread = parallelize(layer().eval(), mesh, ep="e", dp="e", placement=old)
    if rank == 1:
        if why == "training":
            spread.train()
        elif why == "gradients":
            spread.experts.down_proj.grad = torch.zeros_like(spread.experts.down_proj)
        else:
            spread.experts.parallel.captured = True
    try:
        rebalance(spread, new)
    except ValueError as error:
        assert spread.experts.parallel.placement == old
        if rank == 1:
            spread.eval().experts.down_proj.grad = None
        rebalance(spread, new, captured_anew=True)
        assert spread.experts.parallel.placement == new
        return str(error)
    return "no error"
