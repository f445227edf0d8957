"""What has to be sent where, to get from one placement to another. Nothing is sent here.

Each slot whose expert changes is filled from the same rank where that has the expert, and else from
the rank that has it and sends least so far, of the same node if there is one. A function of the two
placements, so every rank finds the same list without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..checks import expect, expect_type
from .placement import Placement


@dataclass(frozen=True, slots=True)
class Move:
    """An expert's weights, from a slot to another; slots are numbered within their rank."""

    expert: int
    source: int  # rank
    source_slot: int
    target: int  # rank
    target_slot: int

    @property
    def is_local(self) -> bool:
        return self.source == self.target


@dataclass(frozen=True, slots=True)
class Moves:
    """All that changes, in one order on all ranks; slots that stay aren't in it."""

    moves: tuple[Move, ...]

    @property
    def sent(self) -> int:
        """Experts that cross from rank to rank."""
        return sum(not move.is_local for move in self.moves)

    def into(self, rank: int) -> list[Move]:
        return [move for move in self.moves if move.target == rank]

    def out_of(self, rank: int) -> list[Move]:
        """To other ranks."""
        return [move for move in self.moves if move.source == rank and not move.is_local]

    def __str__(self) -> str:
        if not self.moves:
            return "nothing moves"
        ranks = {move.target for move in self.moves}
        most = max(len(self.into(rank)) for rank in ranks)
        return (
            f"{len(self.moves)} slots of {len(ranks)} ranks change, at most {most} of one; "
            f"{self.sent} experts are sent"
        )


def plan_moves(old: Placement, new: Placement, *, nodes: Sequence[int] | None = None) -> Moves:
    """The moves that turn `old` into `new`.

    nodes: the node of each rank; an expert that its node has is taken from there. All the same if
    None. Raises ``TypeError``, and ``ValueError`` unless both have the same experts, ranks and
    slots per rank: weights are written into the slots that there are.
    """
    op = "plan_moves"
    for arg, placement in (("old", old), ("new", new)):
        expect_type(placement, Placement, op, arg)
    E = old.num_experts
    expect(new.num_experts == E, op, "new", f"of {E} experts, as old", new.num_experts)
    counts = [*old.counts]
    expect([*new.counts] == counts, op, "new", f"of {counts} slots per rank, as old", [*new.counts])
    where = [0] * old.num_ranks if nodes is None else [*nodes]
    expect(len(where) == old.num_ranks, op, "nodes", f"of {old.num_ranks} ranks", len(where))
    holders: dict[int, list[tuple[int, int]]] = {}
    for rank, experts in enumerate(old.ranks):
        for slot, expert in enumerate(experts):
            holders.setdefault(expert, []).append((rank, slot))
    sends = [0] * old.num_ranks
    found = []
    for target, (before, after) in enumerate(zip(old.ranks, new.ranks, strict=True)):
        for slot, (was, expert) in enumerate(zip(before, after, strict=True)):
            if was == expert:
                continue

            def cost(holder: tuple[int, int], target: int = target) -> tuple[bool, bool, int, int]:
                rank = holder[0]
                return rank != target, where[rank] != where[target], sends[rank], rank

            source, source_slot = min(holders[expert], key=cost)
            sends[source] += source != target
            found.append(Move(expert, source, source_slot, target, slot))
    return Moves(tuple(found))
