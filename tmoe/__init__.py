"""Mixture-of-Experts layers for PyTorch, Triton first."""

from __future__ import annotations

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

_here = _Path(__file__).resolve().parent
if not (_here / "kernels").is_dir() and (_here.parent / "kernels" / "route.py").is_file():
    __path__.append(str(_here.parent))  # a source checkout: tmoe.kernels is <repository>/kernels

from . import formats  # noqa: E402
from .activation import Activation  # noqa: E402
from .dispatch.explain import explain  # noqa: E402
from .dispatch.measure import autotune  # noqa: E402
from .dispatch.prepared import prepare, prepared, release  # noqa: E402
from .dispatch.resolve import NoBackendError  # noqa: E402
from .formats import QuantizedTensor  # noqa: E402
from .low_rank import LowRank  # noqa: E402
from .ops import (  # noqa: E402
    dequantize,
    fused_experts,
    grouped_gemm,
    moe,
    quantize,
    route,
)
from .options import options  # noqa: E402
from .routing import (  # noqa: E402
    ExpertLoad,
    Routing,
    RoutingMethod,
    RoutingRule,
    load_balancing_loss,
    pack_topk,
    router_z_loss,
    simulate_routing,
    unpack_topk,
    update_correction_bias,
)
from .version import __version__ as __version__  # noqa: E402

if _TYPE_CHECKING:
    from . import integrations, lora, parallel
    from .integrations.transformers import from_pretrained, replace_moe
    from .nn import Experts, MoE, Router, RoutingReplay, watch_load

__all__ = [
    "Activation",
    "ExpertLoad",
    "Experts",
    "LowRank",
    "MoE",
    "NoBackendError",
    "QuantizedTensor",
    "Router",
    "Routing",
    "RoutingMethod",
    "RoutingReplay",
    "RoutingRule",
    "autotune",
    "dequantize",
    "explain",
    "formats",
    "from_pretrained",
    "fused_experts",
    "grouped_gemm",
    "integrations",
    "load_balancing_loss",
    "lora",
    "moe",
    "options",
    "pack_topk",
    "parallel",
    "prepare",
    "prepared",
    "quantize",
    "release",
    "replace_moe",
    "route",
    "router_z_loss",
    "simulate_routing",
    "unpack_topk",
    "update_correction_bias",
    "watch_load",
]

_LAZY = {
    "MoE": "tmoe.nn",
    "Router": "tmoe.nn",
    "Experts": "tmoe.nn",
    "RoutingReplay": "tmoe.nn",
    "watch_load": "tmoe.nn",
    "from_pretrained": "tmoe.integrations.transformers",
    "replace_moe": "tmoe.integrations.transformers",
    "integrations": "tmoe.integrations",
    "lora": "tmoe.lora",
    "parallel": "tmoe.parallel",
}


def __getattr__(name: str) -> _Any:
    """Modules and integrations are imported when they are first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'tmoe' has no attribute {name!r}")
    module = _import_module(_LAZY[name])
    value = module if module.__name__ == f"tmoe.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
