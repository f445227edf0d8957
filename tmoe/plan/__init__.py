"""What an expert layer would take on a cluster: predicted times and memory of every layout.

Imported when they are first asked for, so that the command line starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gain import placement_gain
    from .layouts import Estimate, Layout
    from .models import PlanModel, known_model, model_from_config
    from .ranking import Plan, plan

_MODULES = {
    "Estimate": "layouts",
    "Layout": "layouts",
    "Plan": "ranking",
    "PlanModel": "models",
    "known_model": "models",
    "model_from_config": "models",
    "placement_gain": "gain",
    "plan": "ranking",
}
__all__ = [
    "Estimate",
    "Layout",
    "Plan",
    "PlanModel",
    "known_model",
    "model_from_config",
    "placement_gain",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
