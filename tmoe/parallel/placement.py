"""Placement: which rank of expert parallelism holds which experts, and in which order.

Experts are *global* (0 to E - 1, what routers choose). A rank holds copies of some of them in
*slots*, numbered rank by rank: rank 0 has slots 0 to n0 - 1, rank 1 the next n1, and so on. An
expert in several slots has replicas, and each of its tokens goes to one of them.

    Placement.contiguous(5, 2)            rank 0: 0 1 2 | rank 1: 3 4      uneven counts
    Placement(4, ((0, 1, 2), (3, 0)))     rank 0: 0 1 2 | rank 1: 3 0      expert 0 in two slots
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..checks import expect, expect_type


@dataclass(frozen=True)
class Placement:
    """The experts of each rank, hashable. Made by `contiguous`, `from_slots`, or from the lists.

    Attributes:
        num_experts: E, the global number of experts.
        ranks: for each rank the experts that it holds, in the order in which its weights hold them.

    Raises:
        TypeError: something that isn't an int.
        ValueError: an expert that no rank holds, one that a rank holds twice, a number outside
            [0, E), or a rank without experts; with the numbers.
    """

    num_experts: int
    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        op = "Placement"
        E = self.num_experts
        expect_type(E, int, op, "num_experts")
        expect(E >= 1, op, "num_experts", "at least 1", E)
        ranks = tuple(tuple(experts) for experts in self.ranks)
        object.__setattr__(self, "ranks", ranks)
        expect(len(ranks) >= 1, op, "ranks", "at least one rank", ranks)
        for rank, experts in enumerate(ranks):
            arg = f"ranks[{rank}]"
            for e in experts:
                expect_type(e, int, op, arg)
            wanted = "at least one expert (with fewer experts than ranks, give some replicas)"
            expect(len(experts) > 0, op, arg, wanted, "none")
            outside = [e for e in experts if not 0 <= e < E]
            expect(not outside, op, arg, f"experts within [0, {E})", outside)
            twice = sorted({e for e in experts if experts.count(e) > 1})
            expect(not twice, op, arg, "experts of which each is there once", f"twice: {twice}")
        held = {e for experts in ranks for e in experts}
        missing = [e for e in range(E) if e not in held]
        wanted = f"a place for each of {E} experts"
        expect(not missing, op, "ranks", wanted, f"none for {missing}")

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> Placement:
        """Experts in order, as evenly as possible; the first ranks hold one more where E isn't
        divisible. Raises ``ValueError`` for more ranks than experts."""
        op = "Placement.contiguous"
        for arg, size in (("num_experts", num_experts), ("num_ranks", num_ranks)):
            expect_type(size, int, op, arg)
            expect(size >= 1, op, arg, "at least 1", size)
        wanted = f"at most the {num_experts} experts; with more, name replicas in a Placement"
        expect(num_ranks <= num_experts, op, "num_ranks", wanted, num_ranks)
        few, more = divmod(num_experts, num_ranks)
        return cls.from_slots(
            num_experts, range(num_experts), [few + (r < more) for r in range(num_ranks)]
        )

    @classmethod
    def from_slots(
        cls, num_experts: int, slot_experts: Iterable[int], counts: Sequence[int]
    ) -> Placement:
        """The expert in each slot, and how many slots each rank has: EPLB's physical-to-logical
        map, for example."""
        experts = list(slot_experts)
        fits = sum(counts) == len(experts)
        wanted = f"as many in all as slot_experts, {len(experts)}"
        expect(fits, "Placement.from_slots", "counts", wanted, list(counts))
        ends = [sum(counts[: rank + 1]) for rank in range(len(counts))]
        starts = [0, *ends[:-1]]
        return cls(
            num_experts, tuple(tuple(experts[a:b]) for a, b in zip(starts, ends, strict=True))
        )

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_slots(self) -> int:
        """Of all ranks; more than E with replicas."""
        return len(self.slot_experts)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Slots of each rank."""
        return tuple(map(len, self.ranks))

    @cached_property
    def first_slots(self) -> tuple[int, ...]:
        """The number of each rank's first slot."""
        return tuple(sum(self.counts[:rank]) for rank in range(self.num_ranks))

    @cached_property
    def slot_experts(self) -> tuple[int, ...]:
        """The expert in each slot."""
        return tuple(e for experts in self.ranks for e in experts)

    @cached_property
    def slot_ranks(self) -> tuple[int, ...]:
        """The rank of each slot."""
        return tuple(rank for rank, experts in enumerate(self.ranks) for _ in experts)

    @cached_property
    def expert_slots(self) -> tuple[tuple[int, ...], ...]:
        """For each expert the slots that it is in, ascending."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, e in enumerate(self.slot_experts):
            slots[e].append(slot)
        return tuple(map(tuple, slots))

    @property
    def has_replicas(self) -> bool:
        return self.num_slots > self.num_experts

    @cached_property
    def in_order(self) -> bool:
        """Whether slots are the experts themselves: each once, rank by rank."""
        return self.slot_experts == tuple(range(self.num_experts))

    @cached_property
    def fingerprint(self) -> str:
        """The same for equal placements, on every machine."""
        text = repr((self.num_experts, self.ranks)).encode()
        return hashlib.sha256(text).hexdigest()[:16]

    def __str__(self) -> str:
        held = " | ".join(" ".join(map(str, experts)) for experts in self.ranks)
        return f"Placement of {self.num_experts} experts on {self.num_ranks} ranks: {held}"
