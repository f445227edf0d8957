"""Experts' modules of transformers on several ranks: which can be, and what they do then.

`tmoe.parallel` divides the weights and gives a module an object, under the name `PARALLEL`, that
takes a call's tokens to the experts and their sums back. `run_experts` asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from .families import adapter_for
from .fp8_experts import is_fp8_experts
from .quantized import PARALLEL
from .register import NAME
from .routers import router_for
from .swap import class_of, original_class
from .switch import expert_modules


def divisible_experts(model: nn.Module) -> Iterator[tuple[str, Any, str | None]]:
    """The names and modules of a model's experts; the third says why one can't be divided."""
    held = dict(expert_modules(model))
    for name, module in model.named_modules():
        reason = None
        if name in held:
            reason = _why_not(module)
        elif is_fp8_experts(module):
            reason = (
                "transformers' FP8 experts have tensors of their own; load the checkpoint with "
                "tmoe.from_pretrained, whose experts can be divided"
            )
        elif router_for(module) is None and _is_adapted(module):
            if original_class(module) is None:
                reason = "it isn't on tmoe yet: call tmoe.replace_moe(model) first"
            elif hasattr(module, "cannot_divide"):
                reason = module.cannot_divide
            else:
                continue  # a block around experts
        else:
            continue
        yield name, module, reason


def _is_adapted(module: nn.Module) -> bool:
    return adapter_for(module) is not None


def _why_not(module: Any) -> str | None:
    if PARALLEL in vars(module):
        return "it is divided already"
    if reason := getattr(module, "cannot_divide", None):
        return str(reason)
    on_tmoe = original_class(module) is not None or module.config._experts_implementation == NAME
    if not on_tmoe:
        return "it isn't on tmoe yet: call tmoe.replace_moe(model) first"
    if "forward" in vars(module) and "_old_forward" not in vars(module):
        return "another library replaced this instance's forward (transformers' tp_plan does)"
    return None


def run_divided(model: nn.Module, name: str, parallel: Any) -> None:
    """Let the experts' module of that name, whose weights were divided, run with `parallel`."""
    module = model.get_submodule(name)
    setattr(module, PARALLEL, parallel)
    if original_class(module) is None:
        module.register_forward_pre_hook(_expect_tmoe)
    for outer in model.modules():
        if isinstance(outer, PreTrainedModel) and any(m is module for m in outer.modules()):
            vars(outer)["save_pretrained"] = _refuse_saving


def _expect_tmoe(module: Any, args: Any) -> None:
    implementation = module.config._experts_implementation
    if implementation != NAME:
        raise RuntimeError(
            f"{class_of(module).__name__}: its experts are divided among ranks, which only "
            f'experts_implementation="{NAME}" can run, got {implementation!r}'
        )


def _refuse_saving(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "save_pretrained: the experts are divided among ranks, and this one has a part of them; "
        "save the model before it is divided, or each rank its state_dict()"
    )
