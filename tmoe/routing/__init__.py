"""How tokens choose their experts: `Routing` is a recipe, `RoutingMethod` the recipes with a name.

`rule.py` says what there is to choose, `recipe.py` puts numbers to it; `families.py` knows which
router a model of transformers has, and `routers.py` what each of those does.
"""

from .load import ExpertLoad
from .losses import load_balancing_loss, router_z_loss, update_correction_bias
from .packing import pack_topk, unpack_topk
from .recipe import Routing
from .rule import RULES, RoutingMethod, RoutingRule
from .simulate import simulate_routing

__all__ = [
    "RULES",
    "ExpertLoad",
    "Routing",
    "RoutingMethod",
    "RoutingRule",
    "load_balancing_loss",
    "pack_topk",
    "router_z_loss",
    "simulate_routing",
    "unpack_topk",
    "update_correction_bias",
]
