"""Which copy of an expert a token goes to, where an expert has several.

    copy = floor(n_e · frac((t + p) φ)),    t = token · ranks + rank,    φ = (√5 - 1) / 2

t numbers the tokens of all ranks, n_e is the number of copies, p shifts experts against one another
so that a token's popular experts aren't all on the first copies. The multiples of φ fill [0, 1)
evenly, whichever stretch of tokens, or every how manyth of them, chose the expert: of m consecutive
tokens each copy gets m / n_e, give or take one or two. So copies are used evenly without counting,
the choice for a token depends on its place alone, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import expect, expect_type
from .placement import Placement

PHI = 2654435769  # of 2^32


@dataclass(frozen=True, slots=True)
class ReplicaTables:
    """Where the copies are; of shapes that stay the same when a layer is rebalanced, so that a
    captured CUDA graph can go on using them."""

    count: Tensor  # (E,) int32: n_e
    slots: Tensor  # (E, ranks) int32: the slots with a copy, ascending; -1 beyond n_e

    @classmethod
    def of(cls, placement: Placement, *, device: torch.device | str | None = None) -> ReplicaTables:
        places = placement.expert_slots
        rows = [[*own, *[-1] * (placement.num_ranks - len(own))] for own in places]
        count = torch.tensor([len(own) for own in places], dtype=torch.int32, device=device)
        return cls(count, torch.tensor(rows, dtype=torch.int32, device=device))


def choose_slots(
    topk_ids: Tensor, tables: ReplicaTables, *, rank: int = 0, ranks: int = 1
) -> Tensor:
    """topk_ids (T, K) int32 or int64, the experts of this rank's tokens -> the slots that compute
    them, (T, K) int32. Ids outside [0, E) become -1.

    rank, ranks: of the group whose ranks choose at the same time, each for its own tokens.
    """
    op = "choose_slots"
    expect_type(topk_ids, Tensor, op, "topk_ids")
    expect(topk_ids.ndim == 2, op, "topk_ids", "of shape (T, K)", tuple(topk_ids.shape))
    expect(0 <= rank < ranks, op, "rank", f"0 to {ranks - 1}", rank)
    E = len(tables.count)
    ids = topk_ids.long()
    real = (ids >= 0) & (ids < E)
    ids = torch.where(real, ids, 0)
    token = torch.arange(len(ids), device=ids.device)[:, None] * ranks + rank
    fraction = (token + ids * (ids + 1) // 2) * PHI & 0xFFFFFFFF
    copy = (fraction * tables.count.long()[ids]) >> 32
    chosen = tables.slots[ids, copy]
    return torch.where(real, chosen, -1)
