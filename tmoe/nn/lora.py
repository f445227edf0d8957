"""Low-rank adapters on a module of experts: as children of ours, or as PEFT has them.

W[e] (N, D) + scaling · lora_B[e] (N, rank) @ lora_A[e] (rank, D), for each expert e.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..low_rank import LowRank

LORA = "lora"  # the child of an experts module that holds its adapters


class LoraPair(nn.Module):
    """The adapter of one projection: ``lora_A`` (E, rank, D) and ``lora_B`` (E, N, rank)."""

    def __init__(self, sizes: tuple[int, int, int], rank: int, alpha: float, **where: Any) -> None:
        super().__init__()
        E, N, D = sizes
        self.rank, self.alpha = rank, alpha
        self.lora_A = nn.Parameter(torch.empty(E, rank, D, **where))
        self.lora_B = nn.Parameter(torch.empty(E, N, rank, **where))
        self.reset_parameters()

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def reset_parameters(self) -> None:
        """As `nn.Linear` begins, and zero: the layer computes what it did before."""
        bound = 1 / math.sqrt(self.lora_A.shape[2])
        nn.init.uniform_(self.lora_A, -bound, bound)
        nn.init.zeros_(self.lora_B)

    def delta(self) -> Tensor:
        """(E, N, D) in fp32."""
        return torch.bmm(self.lora_B.float(), self.lora_A.float()) * self.scaling

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha}, experts={self.lora_A.shape[0]}"


class ExpertsLora(nn.Module):
    """The adapters of a module of experts: children ``gate_up_proj`` (or ``up_proj``) and
    ``down_proj``, one of them or both. While `merged`, the weights contain them."""

    def __init__(self, pairs: dict[str, LoraPair]) -> None:
        super().__init__()
        self.merged = False
        for name, pair in pairs.items():
            self.add_module(name, pair)

    def low_rank(self, name: str) -> LowRank | None:
        """What to add to the projection of that name."""
        pair = self._modules.get(name)
        if self.merged or not isinstance(pair, LoraPair):
            return None
        return LowRank(pair.lora_A, pair.lora_B, pair.scaling)


class Adapted(NamedTuple):
    """A projection's weight as it is stored, and what to add to it."""

    weight: Tensor
    lora: LowRank | None


def read_adapted(experts: nn.Module, name: str, *, transposed: bool = False) -> Adapted:
    """The weight of that name, read once, and its adapter.

    PEFT's wrapper parametrises the weight with the two factors of one adapter. Reading it would
    make their product and the sum for all experts; what is frozen and what is added are returned
    apart instead. `transposed`: the weight is stored as (E, D, N), and so are the factors.
    """
    own = getattr(experts, LORA, None)
    if isinstance(own, ExpertsLora):
        return Adapted(getattr(experts, name), own.low_rank(name))
    if is_parametrized(experts, name):
        parametrizations: Any = experts.parametrizations[name]  # type: ignore[index]
        factors = parametrizations[0]
        original = parametrizations.original
        apart = len(parametrizations) == 1 and type(factors).__name__ == "_LoraFactorsProxy"
        if apart and not original.requires_grad:
            left, right = factors.lhs, factors.rhs
            if transposed:
                left, right = right.transpose(1, 2), left.transpose(1, 2)
            return Adapted(original, LowRank(right, left, float(factors.scaling)))
    return Adapted(getattr(experts, name), None)
