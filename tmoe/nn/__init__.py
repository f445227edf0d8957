"""The layer as modules: `MoE` holds a `Router`, `Experts` and sometimes a `SharedExpert`."""

from .experts import Experts
from .moe import MoE
from .router import Router
from .shared_expert import SharedExpert

__all__ = ["Experts", "MoE", "Router", "SharedExpert"]
