"""The MoE classes of transformers that are not on its experts interface, as data.

`ADAPTERS` maps a class (by module and name) to our subclass of it; the adapter file, which imports
the model file, is imported when such a module is met. `LEFT_ALONE` maps classes that we don't run
to the reason.
"""

from __future__ import annotations

import re
from importlib import import_module

from torch import nn

from .swap import class_of, original_class
from .version import before

_MODELS = "transformers.models"
ADAPTERS = {
    f"{_MODELS}.dbrx.modeling_dbrx.DbrxExperts": "dbrx.TmoeDbrxExperts",
    f"{_MODELS}.jetmoe.modeling_jetmoe.JetMoeMoE": "jetmoe.TmoeJetMoeMoE",
    f"{_MODELS}.llama4.modeling_llama4.Llama4TextMoe": "llama4.TmoeLlama4TextMoe",
    f"{_MODELS}.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": (
        "longcat_flash.TmoeLongcatFlashExperts"
    ),
    f"{_MODELS}.step3p7.modeling_step3p7.Step3p7Experts": "step3p7.TmoeStep3p7Experts",
}

if before("5.18"):  # where it isn't on the interface yet
    ADAPTERS[f"{_MODELS}.aria.modeling_aria.AriaExperts"] = "aria.TmoeAriaExperts"

_DROPS = "capacity-limited routing that drops tokens, with a dense module per expert"
LEFT_ALONE = {
    "DogeCDMoE": "product-key experts of one embedding row each: there is no expert GEMM to run",
    "InklingSharedExperts": "shared experts, which every token passes through: nothing is routed",
    "JetMoeMoA": "a mixture of attention projections: its two halves surround the attention itself",
    "Mxfp4GptOssExperts": (
        "transformers has its MXFP4 weights in a layout of other kernels; load the checkpoint with "
        "tmoe.from_pretrained, which keeps them as they are stored"
    ),
    "NllbMoeSparseMLP": _DROPS,
    "SwitchTransformersSparseMLP": _DROPS,
    "VitPoseNaiveMoe": "experts are chosen by the data set, not by a router",
}

_LOOKS_LIKE_MOE = re.compile(r"(Experts|MoE|Moe|MoeBlock|MoeLayer|MoELayer|SparseMLP)$")


def adapter_for(module: nn.Module) -> type[nn.Module] | None:
    """Our subclass of the module's class, if there is one, or the module's class if it is ours."""
    cls = class_of(module)
    if original_class(module) is not None:
        return cls
    path = ADAPTERS.get(f"{cls.__module__}.{cls.__qualname__}")
    if path is None:
        return None
    file, _, name = path.partition(".")
    return getattr(import_module(f"{__package__}.adapters.{file}"), name)


def looks_like_moe(module: nn.Module) -> bool:
    """Whether the class name says MoE in the ways that model files say it."""
    return _LOOKS_LIKE_MOE.search(class_of(module).__name__) is not None
