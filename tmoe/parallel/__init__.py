"""Layers over several devices, with `torch.distributed`: where experts are, and who sends what."""

from .balance import balance, balance_groups
from .choose import ExchangeDecision
from .expert_parallel import ExpertParallel
from .faults import RankLostError, RankMismatchError
from .fixed import fixed_tokens
from .layout import Layout
from .load import from_pretrained
from .parallelize import parallelize
from .placement import Placement
from .rebalance import rebalance
from .style import DivideExperts

__all__ = [
    "DivideExperts",
    "ExchangeDecision",
    "ExpertParallel",
    "Layout",
    "Placement",
    "RankLostError",
    "RankMismatchError",
    "balance",
    "balance_groups",
    "fixed_tokens",
    "from_pretrained",
    "parallelize",
    "rebalance",
]
