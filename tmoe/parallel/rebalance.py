"""Move experts from the ranks that hold them to those that shall, while a model is in use.

    1. agree     every rank says what it holds and wants; a difference is an error on all of them
    2. set aside memory for what arrives, and for what changes slots within a rank
    3. exchange  codes, scales and biases, byte by byte, from rank to rank
    4. agree     that everyone has everything
    5. write     into the slots, in place: a copy within the device, which sends nothing

Until 5. nothing is written: where any rank fails before, all keep the old placement, and whoever
can still speak raises an error that names it. Tokens are computed before or after, never between,
since all ranks are inside this function from 1. to 5. Addresses stay the same, and with them CUDA
graphs that were captured. What is set aside is freed when a layer is done, so that a model with
many layers needs the extra memory of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import expect, expect_type
from ..formats import QuantizedTensor
from .placement import Placement
from .rebalance_moves import Move, Moves, plan_moves

OP = "move_experts"
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
    group: dist.ProcessGroup | None = None,
    max_extra_bytes: int | None = None,
) -> Moves:
    """Bring one layer's weights from `old` to `new`; all ranks of `group` call it.

    Args:
        tensors: by name, this rank's slots along their first dimension: weights, plain or
            `QuantizedTensor`, biases, scales of each expert. Written in place.
        old: where the experts are. new: where they shall be, with the same slots per rank.
        group: the ranks of the placement; all ranks if None. They wait for one another.
        max_extra_bytes: refuse, on all ranks, to set aside more than that on any.

    Returns what was moved. Raises, on all ranks and with nothing changed:
        ValueError: ranks that differ in placement or tensors, tensors that don't fit the placement
            or need gradients (an optimizer's state would stay with the wrong expert), too little
            memory allowed.
        RuntimeError: a rank that has no memory left or that was lost.
    """
    rank, size = _group(group)
    problem, moves = None, Moves(())
    try:
        moves = _checked(tensors, old, new, rank, size)
        need = extra_bytes(tensors, moves, rank)
        fits = max_extra_bytes is None or need <= max_extra_bytes
        wanted = f"at least {need:,} bytes, for {len(moves.into(rank))} experts"
        expect(fits, OP, "max_extra_bytes", wanted, max_extra_bytes)
    except (ValueError, TypeError) as error:
        problem = str(error)
    _agree(problem, ValueError, group, _facts(tensors, old, new) if problem is None else {})
    parts = _parts(tensors)
    arriving = moves.into(rank)
    leaving: list[tuple[Move, list[Tensor]]] = []
    aside: list[list[Tensor]] = []
    problem = None
    try:
        aside = [_set_aside(parts, move) for move in arriving]
        leaving = [
            (move, [_bytes(part[move.source_slot]) for part in parts])
            for move in moves.out_of(rank)
        ]
    except RuntimeError as error:  # of the allocator
        problem = f"can't set aside memory for {len(arriving)} experts: {error}"
    _agree(problem, RuntimeError, group)
    _exchange(moves, rank, leaving, dict(zip(arriving, aside, strict=True)), group)
    _agree(None, RuntimeError, group)
    for move, own in zip(arriving, aside, strict=True):
        for part, value in zip(parts, own, strict=True):
            part[move.target_slot].copy_(value)
    return moves


def _group(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(f"{OP}: group must be initialized: call torch.distributed first, got none")
    rank = dist.get_rank(group)
    expect(rank >= 0, OP, "group", "one that this rank is a member of", f"rank {dist.get_rank()}")
    return rank, dist.get_world_size(group)


def _checked(
    tensors: Mapping[str, Tensor], old: Placement, new: Placement, rank: int, size: int
) -> Moves:
    moves = plan_moves(old, new)
    expect(old.num_ranks == size, OP, "old", f"of {size} ranks, those of the group", old.num_ranks)
    slots = old.counts[rank]
    for name, tensor in tensors.items():
        arg = f"tensors[{name!r}]"
        expect_type(tensor, Tensor, OP, arg)
        wanted = "without gradients: an optimizer's state wouldn't move along; call .detach() first"
        expect(not tensor.requires_grad, OP, arg, wanted, "requires_grad=True")
        shape = tuple(tensor.shape)
        expect(len(shape) >= 1 and shape[0] == slots, OP, arg, f"of {slots} slots first", shape)
        for part in tensor.parts() if isinstance(tensor, QuantizedTensor) else []:
            wanted = f"with a scale for each of its {slots} experts"
            fits = part.ndim >= 1 and len(part) == slots
            expect(fits, OP, arg, wanted, tuple(part.shape))
    return moves


def _facts(tensors: Mapping[str, Tensor], old: Placement, new: Placement) -> dict[str, Any]:
    """What has to be the same on all ranks."""
    facts: dict[str, Any] = {"old": old.fingerprint, "new": new.fingerprint}
    for name, tensor in tensors.items():
        parts = tensor.parts() if isinstance(tensor, QuantizedTensor) else [tensor]
        kind = tensor.format if isinstance(tensor, QuantizedTensor) else "plain"
        facts[name] = [kind, *(f"{part.dtype} {tuple(part.shape[1:])}" for part in parts)]
    return facts


def _agree(
    problem: str | None,
    kind: type[ValueError] | type[RuntimeError],
    group: dist.ProcessGroup | None,
    facts: dict[str, Any] | None = None,
) -> None:
    """Tell all ranks this one's problem, and hear theirs. Any problem is an error on each of them;
    so is a rank whose facts aren't those of most."""
    size = dist.get_world_size(group)
    heard: list[Any] = [None] * size
    try:
        dist.all_gather_object(heard, (problem, facts), group=group)
    except RuntimeError as error:
        raise _lost(error) from error
    problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(heard) if text]
    if problems:
        raise kind(f"{OP}: nothing was moved, the old placement stays. {'; '.join(problems)}")
    votes = [repr(their) for _, their in heard]
    usual = max(dict.fromkeys(votes), key=votes.count)
    common = heard[votes.index(usual)][1]
    for rank, (_, their) in enumerate(heard):
        if their != common:
            keys = [key for key in {**common, **their} if common.get(key) != their.get(key)]
            got = {key: their.get(key) for key in keys}
            wanted = {key: common.get(key) for key in keys}
            raise kind(
                f"{OP}: nothing was moved, the old placement stays. rank {rank} must have "
                f"{wanted} as the others, got {got}"
            )


def _lost(error: RuntimeError, waiting_for: str = "all ranks") -> RuntimeError:
    return RuntimeError(
        f"{OP}: rank {dist.get_rank()} waited for {waiting_for}, and one of them was lost or too "
        f"late ({error}). Nothing was moved here, the old placement stays"
    )


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


def _exchange(
    moves: Moves,
    rank: int,
    leaving: list[tuple[Move, list[Tensor]]],
    aside: dict[Move, list[Tensor]],
    group: dist.ProcessGroup | None,
) -> None:
    """Send and receive, in rounds that are the same on all ranks, so that no two wait crosswise."""
    values = dict(leaving)
    between = [move for move in moves.moves if not move.is_local]
    for start in range(0, len(between), ROUND):
        calls, peers = [], set()
        direction: Any
        for move in between[start : start + ROUND]:
            if rank == move.source:
                other, direction, own = move.target, dist.isend, values[move]
            elif rank == move.target:
                own = [_bytes(value) for value in aside[move]]
                other, direction = move.source, dist.irecv
            else:
                continue
            peers.add(other)
            peer = other if group is None else dist.get_global_rank(group, other)
            calls += [dist.P2POp(direction, value, peer, group) for value in own if len(value)]
        if not calls:
            continue
        try:
            for work in dist.batch_isend_irecv(calls):
                work.wait()
        except RuntimeError as error:
            names = ", ".join(map(str, sorted(peers)))
            raise _lost(error, f"experts to or from ranks {names}") from error
