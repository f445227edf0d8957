"""LowRank: what LoRA adds to the weights of one projection of all experts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LowRank(NamedTuple):
    """The experts' weights W (E, N, D) plus ``scaling · b[e] @ a[e]``, without that sum being made.

    ``y[r] = x[r] @ W[e].T + (x[r] @ a[e].T) @ b[e].T · scaling``

    Source: Hu et al., LoRA (arXiv:2106.09685), with a pair of matrices for each expert.
    """

    a: Tensor  # (E, rank, D)
    b: Tensor  # (E, N, rank)
    scaling: float = 1.0

    def of_experts(self, end: int) -> LowRank:
        """Those of the first experts, up to `end`."""
        return LowRank(self.a[:end], self.b[:end], self.scaling)
