"""Quantised weights in an experts module of transformers, under the names that they had.

`hold_quantized` puts them there, `scheme_of` is what every forward asks. Whoever makes the weights,
by quantising a loaded model or by reading a checkpoint, ends here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from tmoe.checks import expect, expect_tensor, expect_type
from tmoe.formats import QuantizedTensor, Scheme

if TYPE_CHECKING:  # it imports transformers, and reports are printed without
    from .activations import ExpertsModule

HELD = "tmoe_scheme"  # the child of an experts module that says how its weights are quantised
PARALLEL = "tmoe_parallel"  # on an experts module that `tmoe.parallel` divided: how it runs
PADDED = "tmoe_padded"  # on an experts module whose rows were filled up to whole blocks of scales


class HeldScheme(nn.Module):
    """What an experts module knows about its quantised weights; `print(model)` shows it.

    A child module, so that static scales of the inputs are saved, copied and moved with the rest,
    and stay fp32 when the model changes its dtype.
    """

    input_scale: Tensor | None
    hidden_scale: Tensor | None

    def __init__(self, name: str, input_scale: Tensor | None, hidden_scale: Tensor | None) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("input_scale", input_scale)
        self.register_buffer("hidden_scale", hidden_scale)

    def of_layer(self) -> dict[str, Any]:
        """Keywords of `tmoe.fused_experts`."""
        scales = {"input_scale": self.input_scale, "hidden_scale": self.hidden_scale}
        return {"scheme": self.name, **scales}

    def of_gemm(self, scale: str) -> dict[str, Any]:
        """Keywords of `tmoe.grouped_gemm`; `scale` is "input_scale" or "hidden_scale"."""
        return {"scheme": self.name, "a_scale": getattr(self, scale)}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> HeldScheme:
        before = {name: scale for name, scale in self._buffers.items() if scale is not None}
        super()._apply(fn, recurse)
        for name, scale in before.items():
            if (moved := getattr(self, name)).dtype != torch.float32:
                setattr(self, name, scale.to(moved.device))
        return self

    def extra_repr(self) -> str:
        static = [name for name, scale in self._buffers.items() if scale is not None]
        return ", ".join((self.name, *static))


class _NotQuantized:
    """`scheme_of` a module with ordinary weights: no keywords."""

    name = None

    def of_layer(self) -> dict[str, Any]:
        return {}

    def of_gemm(self, scale: str) -> dict[str, Any]:
        return {}


_NOT_QUANTIZED = _NotQuantized()


def scheme_of(experts: nn.Module) -> HeldScheme | _NotQuantized:
    """How the module's weights are quantised; ``.name`` is None if they are not."""
    return experts._modules.get(HELD, _NOT_QUANTIZED)  # type: ignore[return-value]


def weight_names(experts: ExpertsModule) -> tuple[str, str]:
    """Dotted names of the parameters of the two projections, below the module."""
    adapted = getattr(experts, "weight_names", None)
    return adapted or ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def is_transposed(experts: nn.Module) -> bool:
    """Whether the module stores (E, H, 2I) and (E, I, H).

    transformers' own flag of that name tells PEFT how to lay adapters out. Classes of ours that
    stand in for one without it say ``stored_transposed`` instead: adapters must fit the module
    whether or not it is replaced.
    """
    return getattr(experts, "stored_transposed", getattr(experts, "is_transposed", False))


def why_not_quantized(experts: ExpertsModule) -> str | None:
    """Why the module can't hold quantised weights, or None."""
    if reason := getattr(experts, "cannot_quantize", None):
        return reason
    for name in weight_names(experts):
        owner, _, last = name.rpartition(".")
        if is_parametrized(experts.get_submodule(owner), last):
            return f"its {name} is parametrised (LoRA, for example); merge or remove that first"
    return None


def hold_quantized(
    experts: ExpertsModule,
    gate_up_proj: QuantizedTensor,
    down_proj: QuantizedTensor,
    scheme: str,
    *,
    input_scale: Tensor | None = None,
    hidden_scale: Tensor | None = None,
) -> None:
    """Make `experts` compute with these weights; what it held before is let go.

    Args:
        experts: a module on transformers' experts interface, or one that `replace_moe` has put on
            tmoe. Its own weights give the sizes and may be on the meta device. Its biases stay.
        gate_up_proj: (E, 2I, H), or (E, I, H) where there is no gate, with the rows in the order
            that the module has them (gpt-oss: g0, u0, g1, u1, ...), also where the module stored
            the transpose. It becomes the parameter of the name that the module has for it.
        down_proj: (E, H, I).
        scheme: a name of `tmoe.formats.SCHEMES` that takes weights of this format.
        input_scale, hidden_scale: as for `tmoe.fused_experts`; kept in fp32.

    Raises:
        TypeError, ValueError: with what was wanted and what came; nothing has changed then.
    """
    op = "hold_quantized"
    chosen = Scheme.of(scheme, op)
    reason = why_not_quantized(experts)
    expect(reason is None, op, "experts", "able to hold them", reason)
    names = weight_names(experts)
    current = [experts.get_parameter(name) for name in names]
    E = current[1].shape[0]  # LongCat-Flash's gate_up_proj has rows of experts that don't exist
    transposed = is_transposed(experts)
    for arg, weight, old in zip(
        ("gate_up_proj", "down_proj"), (gate_up_proj, down_proj), current, strict=True
    ):
        expect_type(weight, QuantizedTensor, op, arg)
        rows, columns = old.shape[:0:-1] if transposed else old.shape[1:]
        fits = tuple(weight.shape) == (E, rows, columns)
        expect(fits, op, arg, f"of shape {(E, rows, columns)}", tuple(weight.shape))
        fits = chosen.accepts(weight.format, weight.block_shape)
        forms = " or ".join(f"{r.format.name} {r.block_shape}" for r in chosen.weights)
        expect(fits, op, arg, f"{forms} for {scheme}", f"{weight.format} {weight.block_shape}")
    device = gate_up_proj.device
    expect(down_proj.device == device, op, "down_proj", f"on {device}", down_proj.device)
    scales = []
    for arg, scale in (("input_scale", input_scale), ("hidden_scale", hidden_scale)):
        if scale is not None:
            expect_tensor(scale, op, arg)
            expect(chosen.takes_scales, op, arg, f"None for {scheme}", "a tensor")
            fits = scale.numel() == 1 or scale.shape == (E,)
            expect(fits, op, arg, f"one number or of shape ({E},)", tuple(scale.shape))
            scale = scale.detach().to(device, torch.float32)
        scales.append(scale)

    for name, weight in zip(names, (gate_up_proj, down_proj), strict=True):
        owner, _, last = name.rpartition(".")
        parameter = nn.Parameter(weight, requires_grad=False)
        experts.get_submodule(owner).register_parameter(last, parameter)
    if transposed:
        flag = "stored_transposed" if hasattr(experts, "stored_transposed") else "is_transposed"
        setattr(experts, flag, False)
    setattr(experts, HELD, HeldScheme(scheme, *scales))
