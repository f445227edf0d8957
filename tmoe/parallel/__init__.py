"""Layers over several devices, with `torch.distributed`: where experts are, and who sends what."""

from .choose import ExchangeDecision
from .expert_parallel import ExpertParallel, fixed_tokens
from .faults import RankLostError, RankMismatchError
from .layout import Layout
from .parallelize import parallelize
from .placement import Placement

__all__ = [
    "ExchangeDecision",
    "ExpertParallel",
    "Layout",
    "Placement",
    "RankLostError",
    "RankMismatchError",
    "fixed_tokens",
    "parallelize",
]
