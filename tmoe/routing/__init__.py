"""How tokens choose their experts: `Routing` is a recipe, `RoutingMethod` the recipes with a name.

`rule.py` says what there is to choose, `recipe.py` puts numbers to it, `families.py` knows what the
models of transformers do.
"""

from .recipe import Routing
from .rule import RULES, RoutingMethod, RoutingRule

__all__ = ["RULES", "Routing", "RoutingMethod", "RoutingRule"]
