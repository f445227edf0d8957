"""How evenly a router spreads its tokens over the experts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..checks import expect, expect_size, expect_tensor

SHOWN = 16  # experts in a printed table, the busiest
BAR = 30  # characters of the longest bar


class ExpertLoad:
    """Slots that each expert got, added up over calls.

        load = tmoe.ExpertLoad(num_experts=64)
        weights, ids, counts = tmoe.route(logits, routing, return_counts=True)
        load.add(counts)  # or load.add_ids(ids)
        print(load)

    Adding never waits for the device; printing and the measures below read the counts back.

    * ``counts``: (E,) int64 on the device.
    * ``total``: slots in all.
    * ``share``: (E,) float64 on the CPU, each expert's part of the slots; sums to 1.
    * ``imbalance``: the busiest expert's count over the mean. 1 is even; E is one expert for all.
      A layer spread over GPUs waits for its busiest one, so this is what imbalance costs.
    * ``dead``: ids of the experts that got nothing.
    * ``entropy``: of the shares, relative to log E. 1 is even, 0 is one expert for all.

    Before anything is added, shares are 0 and the measures are NaN.
    """

    counts: Tensor

    def __init__(self, num_experts: int, *, device: torch.device | str | None = None) -> None:
        expect_size(num_experts, "ExpertLoad", "num_experts")
        self.num_experts = num_experts
        self.counts = torch.zeros(num_experts, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, counts: Tensor) -> None:
        """Add `counts` (E,), those that `route(..., return_counts=True)` returns."""
        expect_tensor(counts, "ExpertLoad.add", "counts")
        if counts.is_floating_point() or counts.is_complex():
            raise TypeError(f"ExpertLoad.add: counts must be integers, got {counts.dtype}")
        E = self.num_experts
        ok = counts.shape == (E,)
        expect(ok, "ExpertLoad.add", "counts", f"of shape ({E},)", tuple(counts.shape))
        self.counts += counts.to(self.counts)

    @torch.no_grad()
    def add_ids(self, topk_ids: Tensor) -> None:
        """Count `topk_ids`, integers of any shape. Ids outside [0, E) count for no expert.

        To leave out padding, give it -1: ``ids.masked_fill(padding[:, None], -1)``.
        """
        expect_tensor(topk_ids, "ExpertLoad.add_ids", "topk_ids")
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"ExpertLoad.add_ids: topk_ids must be int32 or int64, got {topk_ids.dtype}"
            )
        ids = topk_ids.to(self.counts).flatten()
        real = (ids >= 0) & (ids < self.num_experts)
        self.counts.scatter_add_(0, torch.where(real, ids, 0), real.long())

    def reset(self) -> None:
        """Start from zero."""
        self.counts.zero_()

    def all_reduce(self, group: Any = None) -> ExpertLoad:
        """The sum over the ranks of `group` (all ranks if None), as a new `ExpertLoad`."""
        total = ExpertLoad(self.num_experts, device=self.counts.device)
        total.counts.copy_(self.counts)
        torch.distributed.all_reduce(total.counts, group=group)
        return total

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def share(self) -> Tensor:
        counts = self.counts.cpu().double()
        return counts / counts.sum().clamp(min=1)

    @property
    def imbalance(self) -> float:
        return _imbalance(self.share)

    @property
    def dead(self) -> list[int]:
        return (self.counts == 0).nonzero().flatten().tolist()

    @property
    def entropy(self) -> float:
        return _entropy(self.share)

    def summary(self) -> str:
        """One line: slots, imbalance, entropy, dead experts, the busiest one."""
        share = self.share
        busiest = int(share.argmax())
        return (
            f"{self.total:,} slots, max/mean {_imbalance(share):.2f}, "
            f"entropy {_entropy(share):.3f}, {len(self.dead)} of {self.num_experts} dead, "
            f"busiest {busiest} ({share[busiest]:.1%})"
        )

    def __str__(self) -> str:
        share = self.share
        order = share.argsort(descending=True, stable=True).tolist()
        largest = max(float(share.max()), math.ulp(0.0))
        lines = [self.summary()]
        for expert in order[:SHOWN]:
            part = float(share[expert])
            lines.append(f"  expert {expert:4} {part:7.2%} {'█' * round(BAR * part / largest)}")
        if len(order) > SHOWN:
            rest = float(share[order[SHOWN:]].sum())
            lines.append(f"  {len(order) - SHOWN} others {rest:7.2%}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"ExpertLoad(num_experts={self.num_experts}, device={str(self.counts.device)!r})"


def _imbalance(share: Tensor) -> float:
    return float(share.max() / share.mean())  # NaN of zeros


def _entropy(share: Tensor) -> float:
    if not share.any():
        return math.nan
    if len(share) == 1:
        return 1.0
    return float(-torch.special.xlogy(share, share).sum() / math.log(len(share)))
