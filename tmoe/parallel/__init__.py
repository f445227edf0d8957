"""Layers over several devices, with `torch.distributed`: where experts are, and who sends what."""

from .adapters import save_adapters
from .balance import balance, balance_groups
from .choose import ExchangeDecision
from .expert_parallel import ExpertParallel, fixed_tokens
from .faults import RankLostError, RankMismatchError
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
    "save_adapters",
]
