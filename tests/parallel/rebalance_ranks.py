"""What the ranks of `test_rebalance.py` do; each function runs on every rank."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import tmoe
from tests.live_bytes import LiveBytes
from tmoe.parallel import rebalance
from tmoe.parallel.balance import balance
from tmoe.parallel.balance_replicas import ReplicaTables, choose_slots
from tmoe.parallel.placement import Placement
from tmoe.parallel.rebalance import extra_bytes, move_experts
from tmoe.parallel.rebalance_moves import plan_moves

E, K, H, I, T = 10, 2, 64, 32, 48
SCHEMES = ("fp8_block", "nvfp4", "mxfp4", "fp8_tensor")


def loads(kind: str) -> list[float]:
    return [1.0] * E if kind == "even" else [1000 / (1 + e) ** 1.2 for e in range(E)]


def all_experts(kind: str) -> dict[str, torch.Tensor]:
    """Of all E, the same on every rank."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(E, *shape, generator=random)

    gate_up, down = normal(2 * I, H), normal(H, I)
    if kind in SCHEMES:
        gate_up, down = (tmoe.quantize(w, kind) for w in (gate_up, down))
    elif kind == "transposed":
        gate_up = gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    elif kind == "bf16":
        gate_up, down = gate_up.bfloat16(), down.bfloat16()
    return {
        "gate_up_proj": gate_up, "down_proj": down, "down_proj_bias": normal(H),
        "input_scale": normal(),
    }  # fmt: skip


def slots_of(experts: dict[str, torch.Tensor], own: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Those of a rank, as a layer holds them."""
    result = {}
    for name, tensor in experts.items():
        piece = tensor[list(own)]
        if name == "gate_up_proj" and not isinstance(tensor, tmoe.QuantizedTensor):
            kept = torch.empty_strided((len(own), *tensor.shape[1:]), tensor.stride(),
                                       dtype=tensor.dtype)  # fmt: skip
            piece = kept.copy_(piece)
        result[name] = piece
    return result


def parts_of(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [
        part
        for tensor in tensors.values()
        for part in (tensor.parts() if isinstance(tensor, tmoe.QuantizedTensor) else [tensor])
    ]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    pairs = zip(parts_of(a), parts_of(b), strict=True)
    return all(
        x.dtype == y.dtype
        and x.contiguous().view(torch.uint8).equal(y.contiguous().view(torch.uint8))
        for x, y in pairs
    )


def output(tensors: dict[str, torch.Tensor], placement: Placement, rank: int) -> torch.Tensor:
    """The layer over all ranks: each has all tokens, computes its slots, and the sum is reduced."""
    x, weights, ids = tokens()
    chosen = choose_slots(ids, ReplicaTables.of(placement))
    partial = tmoe.fused_experts(
        x, tensors["gate_up_proj"], tensors["down_proj"], weights, chosen,
        first_expert=placement.first_slots[rank], num_experts=placement.num_slots,
    )  # fmt: skip
    dist.all_reduce(partial)
    return partial


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1))
    weights, ids = tmoe.simulate_routing(T, E, K, distribution="skewed", skew=1.2)
    return x, weights, ids


def scenarios(rank: int) -> dict[str, Any]:
    """On four ranks."""
    size, found = dist.get_world_size(), {}
    old, new = (balance(loads(kind), size, redundant=1) for kind in ("even", "zipf"))
    for kind in ("fp32", "bf16", "transposed", *SCHEMES):
        experts = all_experts(kind)
        tensors = slots_of(experts, old.ranks[rank])
        places = [part.data_ptr() for part in parts_of(tensors)]
        before = output(tensors, old, rank) if kind == "fp32" else None
        allowed = extra_bytes(tensors, plan_moves(old, new), rank)
        with LiveBytes(parts_of(tensors)) as memory:
            moves = move_experts(tensors, old, new, max_extra_bytes=allowed)
        found[kind] = {
            "memory": (memory.most, allowed),
            "right": same(tensors, slots_of(experts, new.ranks[rank])),
            "in place": places == [part.data_ptr() for part in parts_of(tensors)],
            "moved": len(moves.into(rank)),
        }
        if before is not None:
            found["outputs"] = before, output(tensors, new, rank)
            found["back"] = move_experts(tensors, new, old).sent
            found["right again"] = same(tensors, slots_of(experts, old.ranks[rank]))
    found["errors"] = {name: refused(name, rank, old, new) for name in BROKEN}
    found["subgroup"] = subgroup(rank)
    return found


BROKEN = (
    "another placement", "another dtype", "gradients", "too little memory", "no memory",
    "other sizes", "another number of ranks",
)  # fmt: skip


def refused(name: str, rank: int, old: Placement, new: Placement) -> tuple[str, str, bool]:
    """Kind and words of the error if rank 2 has something else, and whether all stays."""
    tensors, options, untouched = slots_of(all_experts("fp32"), old.ranks[rank]), {}, None
    set_aside = rebalance._set_aside
    if name == "another number of ranks":
        old, new = Placement.contiguous(E, 3), Placement.contiguous(E, 3)
    elif rank == 2:
        if name == "another placement":
            new = balance(loads("even")[::-1], 4, redundant=1, current=new)
            new = Placement(E, (*new.ranks[:3], tuple(reversed(new.ranks[3]))))
        elif name == "another dtype":
            tensors["down_proj"] = tensors["down_proj"].bfloat16()
        elif name == "gradients":
            tensors["down_proj"].requires_grad_()
        elif name == "too little memory":
            need = extra_bytes(tensors, plan_moves(old, new), rank)
            options["max_extra_bytes"] = need - 1
        elif name == "other sizes":
            tensors["down_proj"] = tensors["down_proj"][:-1]
        elif name == "no memory":

            def fail(*arguments: object) -> list[torch.Tensor]:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

            rebalance._set_aside = fail
    untouched = {key: value.detach().clone() for key, value in tensors.items()}
    try:
        move_experts(tensors, old, new, **options)
    except (ValueError, RuntimeError) as error:
        detached = {key: value.detach() for key, value in tensors.items()}
        return type(error).__name__, str(error), same(detached, untouched)
    finally:
        rebalance._set_aside = set_aside
    return "nothing", "", False


def subgroup(rank: int) -> Any:
    """Ranks 3 and 1 are a group of their own; the others aren't in it."""
    group = dist.new_group([1, 3])
    old, new = (
        Placement.contiguous(E, 2),
        Placement(E, tuple(reversed(Placement.contiguous(E, 2).ranks))),
    )
    mine = dist.get_rank(group)
    experts = all_experts("fp32")
    tensors = slots_of(experts, old.ranks[max(mine, 0)])
    try:
        move_experts(tensors, old, new, group=group)
    except ValueError as error:
        return str(error)
    return same(tensors, slots_of(experts, new.ranks[mine]))


def lose_a_rank(rank: int) -> Any:
    """Of two; rank 1 ends when the experts are about to be exchanged."""
    old = Placement(E, (tuple(range(0, E, 2)), tuple(range(1, E, 2))))
    new = Placement.contiguous(E, 2)
    experts = all_experts("fp32")
    tensors = slots_of(experts, old.ranks[rank])
    if rank == 1:
        rebalance._exchange = lambda *_: os._exit(1)
    try:
        move_experts(tensors, old, new)
    except RuntimeError as error:
        return str(error), same(tensors, slots_of(experts, old.ranks[rank]))
    return "no error", False
