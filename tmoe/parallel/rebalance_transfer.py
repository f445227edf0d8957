"""`move_experts`: one layer's weights from the ranks that hold them to those that shall.

    1. agree     every rank says what it holds and wants; a difference is an error on all of them
    2. set aside memory for what arrives, and for what changes slots within a rank
    3. exchange  codes, scales and biases, byte by byte, from rank to rank
    4. agree     that everyone has everything
    5. write     into the slots, in place: a copy within the device, which sends nothing

Until 5. nothing is written: where any rank fails before, all keep the old placement, and whoever
can still speak raises an error that names it. No token is computed in between, since all ranks are
inside this function from 1. to 5. What is set aside is freed at the end, so that a model with many
layers needs the extra memory of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import expect, expect_type
from ..formats import QuantizedTensor
from .faults import RankMismatchError, differences, next_number, said_by_all
from .groups import Group, naming
from .placement import Placement
from .rebalance_moves import Move, Moves, plan_moves

OP = "move_experts"
STAYS = "nothing was moved, the old placement stays"
ROUND = 64  # moves whose messages are under way at once


def extra_bytes(tensors: Mapping[str, Tensor], moves: Moves, rank: int) -> int:
    """What `move_experts` sets aside on `rank`: its experts that arrive or change slots, and a copy
    of those that leave where an expert's weights aren't contiguous."""
    arriving, leaving, total = len(moves.into(rank)), len(moves.out_of(rank)), 0
    for part in _parts(tensors):
        times = arriving if part[0].is_contiguous() else arriving + leaving
        total += times * part[0].nbytes
    return total


@torch.no_grad()
def move_experts(
    tensors: Mapping[str, Tensor],
    old: Placement,
    new: Placement,
    *,
    group: Group,
    everyone: Group | None = None,
    max_extra_bytes: int | None = None,
    name: str = "a layer",
    problem: str | None = None,
) -> Moves:
    """Bring one layer's weights from `old` to `new`; all ranks of `everyone` call it.

    Args:
        tensors: by name, this rank's slots along their first dimension: weights, plain or
            `QuantizedTensor`, biases, scales of each expert. Written in place.
        old: where the experts are. new: where they shall be, with the same slots per rank.
        group: the ranks of the placement. everyone: these and others that hold other parts of the
            same experts (tp), which all move or none; the group if None.
        max_extra_bytes: refuse, on all ranks, to set aside more than that on any.
        problem: why this rank can't, if it can't; told to all.

    Raises, on all ranks and with nothing changed:
        ValueError: what one of them said: tensors that don't fit the placement, too little memory
            allowed, its `problem`.
        RankMismatchError: ranks that differ in placement or tensors.
        RankLostError: a rank was lost. RuntimeError: a rank has no memory left.
    """
    everyone = group if everyone is None else everyone
    call = Call(name, next_number(everyone.handle, "moves of experts"))
    moves, facts = Moves(()), {}
    if problem is None:
        try:
            moves = _checked(tensors, old, new, group)
            need = extra_bytes(tensors, moves, group.rank)
            fits = max_extra_bytes is None or need <= max_extra_bytes
            wanted = f"at least {need:,} bytes, for {len(moves.into(group.rank))} experts"
            expect(fits, OP, "max_extra_bytes", wanted, max_extra_bytes)
            facts = {"layer": name, **_facts(tensors, old, new)}
        except (ValueError, TypeError) as error:
            problem = str(error)
    if group.handle is not everyone.handle:  # other parts of the experts may have other sizes
        sizes = {} if problem else _sizes(tensors)
        said = _say(group, call, "sizes", {"problem": problem, **sizes})
        if not any(one["problem"] for one in said):
            problem = differences(group.ranks, said) or None
    else:
        facts = {**facts, **({} if problem else _sizes(tensors))}
    _agree(everyone, call, "begin", ValueError, problem, facts)
    parts = _parts(tensors)
    arriving, leaving = moves.into(group.rank), moves.out_of(group.rank)
    aside: list[list[Tensor]] = []
    sent: list[list[Tensor]] = []
    try:
        aside = [_set_aside(parts, move) for move in arriving]
        sent = [[_bytes(part[move.source_slot]) for part in parts] for move in leaving]
    except RuntimeError as error:  # of the allocator
        problem = f"can't set aside memory for {len(arriving)} experts: {error}"
    _agree(everyone, call, "memory", RuntimeError, problem)
    values = dict(zip(leaving, sent, strict=True))
    for move, space in zip(arriving, aside, strict=True):
        if not move.is_local:
            values[move] = [_bytes(value) for value in space]
    with naming(group, f"moving the experts of {name}; {STAYS}; the exchange"):
        _exchange(moves, values, group)
    _agree(everyone, call, "arrived", RuntimeError, None)
    for move, own in zip(arriving, aside, strict=True):
        for part, value in zip(parts, own, strict=True):
            with torch.inference_mode() if part.is_inference() else nullcontext():
                part[move.target_slot].copy_(value)
    return moves


def _checked(tensors: Mapping[str, Tensor], old: Placement, new: Placement, group: Group) -> Moves:
    moves = plan_moves(old, new)
    fits = old.num_ranks == group.size
    expect(fits, OP, "old", f"of {group.size} ranks, those of the group", old.num_ranks)
    slots = old.counts[group.rank]
    for name, tensor in tensors.items():
        arg = f"tensors[{name!r}]"
        expect_type(tensor, Tensor, OP, arg)
        shape = tuple(tensor.shape)
        expect(len(shape) >= 1 and shape[0] == slots, OP, arg, f"of {slots} slots first", shape)
        for part in tensor.parts() if isinstance(tensor, QuantizedTensor) else []:
            wanted = f"with a scale for each of its {slots} experts"
            fits = part.ndim >= 1 and len(part) == slots
            expect(fits, OP, arg, wanted, tuple(part.shape))
    return moves


def _facts(tensors: Mapping[str, Tensor], old: Placement, new: Placement) -> dict[str, Any]:
    """What has to be the same on all ranks."""
    facts: dict[str, Any] = {"old placement": old.fingerprint, "new placement": new.fingerprint}
    for name, tensor in tensors.items():
        parts = tensor.parts() if isinstance(tensor, QuantizedTensor) else [tensor]
        kind = tensor.format if isinstance(tensor, QuantizedTensor) else "plain"
        dtypes = (str(part.dtype).removeprefix("torch.") for part in parts)
        facts[f"format of {name}"] = " ".join([kind, *dtypes])
    return facts


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Of one expert: what has to be the same on ranks that have the same part of experts."""
    return {f"size of {name}": list(tensor.shape[1:]) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class Call:
    """Which layer, and how many calls there were before, which ranks have in common."""

    name: str
    number: int


def _say(group: Group, call: Call, step: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Tell all ranks of the group, and hear what each of them says."""
    if group.handle is None:
        return [mine]
    what = f"moving the experts of {call.name}, step {step!r}; {STAYS}"
    key = f"move/{call.number}/{step}"
    return said_by_all(group.handle, group.ranks, group.rank, key, what, mine)


def _agree(
    everyone: Group,
    call: Call,
    step: str,
    kind: type[Exception],
    problem: str | None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """A problem of any rank, or facts that differ, is an error on each of them."""
    said = _say(everyone, call, step, {"problem": problem, "facts": dict(facts or {})})
    problems = [
        f"rank {rank}: {one['problem']}"
        for rank, one in zip(everyone.ranks, said, strict=True)
        if one["problem"]
    ]
    if problems:
        raise kind(f"{OP}: {call.name}: {STAYS}. {'; '.join(problems)}")
    differs = differences(everyone.ranks, [one["facts"] for one in said])
    if differs:
        raise RankMismatchError(f"{OP}: {call.name}: {STAYS}. {differs}")


def _parts(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Plain tensors: codes, scales and global scales one by one."""
    return [
        part
        for tensor in tensors.values()
        for part in (tensor.parts() if isinstance(tensor, QuantizedTensor) else [tensor])
    ]


def _set_aside(parts: list[Tensor], move: Move) -> list[Tensor]:
    """What arrives from the same rank, or space for what will from another."""
    if move.is_local:
        return [part[move.source_slot].clone() for part in parts]
    return [torch.empty(part.shape[1:], dtype=part.dtype, device=part.device) for part in parts]


def _bytes(value: Tensor) -> Tensor:
    """As bytes, which every backend sends, whatever the dtype; a view where it is contiguous."""
    return value.contiguous().reshape(-1).view(torch.uint8)


def _exchange(moves: Moves, values: Mapping[Move, list[Tensor]], group: Group) -> None:
    """Send and receive, in rounds that are the same on all ranks, so that no two wait crosswise."""
    between = [move for move in moves.moves if not move.is_local]
    direction: Any
    for start in range(0, len(between), ROUND):
        calls = []
        for move in between[start : start + ROUND]:
            if group.rank == move.source:
                other, direction = move.target, dist.isend
            elif group.rank == move.target:
                other, direction = move.source, dist.irecv
            else:
                continue
            peer = group.ranks[other]
            calls += [
                dist.P2POp(direction, value, peer, group.handle)
                for value in values[move]
                if len(value)
            ]
        if calls:
            for work in dist.batch_isend_irecv(calls):
                work.wait()
    for device in {value.device for own in values.values() for value in own}:
        if device.type == "cuda":  # so far only the stream waits: nobody knows that it is here
            torch.cuda.current_stream(device).synchronize()
