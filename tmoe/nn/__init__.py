"""The layer as modules: `MoE` holds a `Router`, `Experts` and sometimes a `SharedExpert`."""

from .experts import Experts
from .load import ModelLoad, watch_load
from .moe import MoE
from .replay import RoutingReplay
from .router import Router
from .shared_expert import SharedExpert

__all__ = [
    "Experts",
    "MoE",
    "ModelLoad",
    "Router",
    "RoutingReplay",
    "SharedExpert",
    "watch_load",
]
