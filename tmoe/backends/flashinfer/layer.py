"""An expert layer as a recipe takes it: what is allowed, sizes filled up, parts in order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...activation import Activation
from ...checks import expect, expect_tensor, expect_type
from ...dispatch.prepared import ExpertWeights
from ...formats import QuantizedTensor
from .layouts import as_bytes, interleave_halves, up_gate, up_gate_from_interleaved


@dataclass(frozen=True, slots=True)
class Sizes:
    """A layer's own sizes and those of its tensors once they are filled up with zeros.

    A caller fills x up to `padded_hidden`, too, and passes an output as wide as the layer. It
    leaves `valid_hidden_size` out: with it, FlashInfer expects fewer rows of the second matrix.
    """

    hidden: int
    intermediate: int
    padded_hidden: int
    padded_intermediate: int  # what FlashInfer calls intermediate_size


@dataclass(frozen=True, slots=True)
class Rule:
    """What a recipe accepts."""

    op: str  # its function
    formats: tuple[str, ...]  # of both projections; a dtype where they aren't quantised
    activations: tuple[str, ...]
    hidden: tuple[int, int | None]  # multiples: H is one, or is filled up to one (None: refused)
    intermediate: tuple[int, int]  # multiples that I is filled up to: with and without a gate
    limit: bool = True  # whether swiglu may have one
    bias: bool = False

    def wanted_activation(self, activation: Activation) -> str | None:
        """What is wanted in place of `activation`; None: it is fine."""
        limited = activation.name == "swiglu" and activation.limit != math.inf
        if activation.name in self.activations and (self.limit or not limited):
            return None
        return " or ".join(self.activations) + ("" if self.limit else ", swiglu without limit")

    def wanted_size(self, H: int, I: int, *, gated: bool) -> tuple[str, int] | None:
        """What is wanted of a size, and that size; None: both are fine."""
        multiple, filled = self.hidden
        if H % multiple != 0 and filled is None:
            return f"of a hidden size that is a multiple of {multiple}", H
        multiple = self.intermediate[0 if gated else 1]
        if "fp8_block" in self.formats and I % multiple != 0:
            wanted = f"of an intermediate size that is a multiple of {multiple}: its scales' blocks"
            return wanted, I
        return None


@dataclass(frozen=True, slots=True)
class Layer:
    """`ExpertWeights` that a recipe accepts; the methods bring their parts into order."""

    op: str
    experts: ExpertWeights
    activation: Activation
    format: str
    sizes: Sizes

    @classmethod
    def of(cls, rule: Rule, experts: ExpertWeights) -> Layer:
        """Raise TypeError or ValueError unless the rule allows all that `experts` hold."""
        op = rule.op
        expect_type(experts, ExpertWeights, op, "experts")
        formats = [_format(rule, arg, experts) for arg in ("gate_up_proj", "down_proj")]
        expect(formats[0] == formats[1], op, "down_proj", f"{formats[0]} as well", formats[1])
        format, activation = formats[0], Activation.of(experts.activation)
        wanted_activation = rule.wanted_activation(activation)
        expect(wanted_activation is None, op, "activation", wanted_activation or "", activation)
        apart = activation.gated and format != "fp8_block"
        wanted = "False without a gate, and with 128×128 scales that gate and up would share"
        expect(apart or not experts.interleaved, op, "interleaved", wanted, True)
        is_static = format in ("fp8_tensor", "nvfp4")
        for arg in ("input_scale", "hidden_scale"):
            wanted = "a static scale" if is_static else f"None for {format}"
            given = getattr(experts, arg)
            expect((given is not None) == is_static, op, arg, wanted, given)
        return cls(op, experts, activation, format, _sizes(rule, experts, activation))

    def fc1(self, part: Tensor, values: int = 1) -> Tensor:
        """A part of gate_up_proj, (E, rows, columns) or (E, rows): up first, each half of the rows
        and the columns filled up. `values` of the matrix share a column."""
        if self.activation.gated:
            part = (up_gate_from_interleaved if self.experts.interleaved else up_gate)(part)
        halves = part.unflatten(1, (1 + self.activation.gated, -1))
        sizes = (self.sizes.padded_intermediate, self.sizes.padded_hidden // values)
        return _filled(halves, *sizes[: part.ndim - 1]).flatten(1, 2)

    def fc2(self, part: Tensor, values: int = 1) -> Tensor:
        """A part of down_proj, (E, rows, columns) or (E, rows), filled up. New memory."""
        sizes = (self.sizes.padded_hidden, self.sizes.padded_intermediate // values)
        return _filled(part, *sizes[: part.ndim - 1])

    def fused(self, part: Tensor) -> Tensor:
        """Rows [up; gate] -> u0, g0, u1, g1, ..., where there is a gate."""
        return interleave_halves(part) if self.activation.gated else part

    def biases(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Both in this dtype, up first and filled up."""
        first, second = self.experts.gate_up_bias, self.experts.down_bias
        return (
            None if first is None else self.fc1(first.detach().to(dtype)),
            None if second is None else self.fc2(second.detach().to(dtype)),
        )

    def constants(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """SwiGLU's alpha, beta and limit, (E,) fp32; None stands for 1, for 0 and for infinity."""
        a, weight = self.activation, self.experts.down_proj
        beta = 1.0 if a.name == "swiglu_oai" else 0.0
        ones = torch.ones(weight.shape[0], dtype=torch.float32, device=weight.device)
        alphas, betas, limits = (
            None if value == default else ones * value
            for value, default in ((a.alpha, 1.0), (beta, 0.0), (a.limit, math.inf))
        )
        return alphas, betas, limits

    def static_scale(self, arg: str, *, per_expert: bool) -> Tensor:
        """A scale of the inputs in fp32: 0-d, or (E,) if the experts' differ and may differ."""
        weight, given = self.experts.down_proj, getattr(self.experts, arg)
        expect_type(given, (Tensor, float, int), self.op, arg)
        scale = torch.as_tensor(given, dtype=torch.float32, device=weight.device).detach()
        fits = scale.numel() == 1 or scale.shape == weight.shape[:1]
        wanted = f"one number or of shape ({weight.shape[0]},)"
        expect(fits, self.op, arg, wanted, tuple(scale.shape))
        usable = torch.isfinite(scale) & (scale > 0)
        expect(bool(usable.all()), self.op, arg, "finite and above 0", scale.tolist())
        if scale.numel() == 1 or bool((scale == scale[0]).all()):
            return scale.flatten()[0].clone()
        wanted = "the same for all experts, whose inputs are quantised once"
        expect(per_expert, self.op, arg, wanted, scale.tolist())
        return scale.clone()


def _format(rule: Rule, arg: str, experts: ExpertWeights) -> str:
    """Of a projection, checked: a format's name, or a dtype's."""
    weight = getattr(experts, arg)
    expect_tensor(weight, rule.op, arg)
    quantized = isinstance(weight, QuantizedTensor)
    name = weight.format if quantized else str(weight.dtype).removeprefix("torch.")
    expect(name in rule.formats, rule.op, arg, f"of {' or '.join(rule.formats)}", name)
    expect(weight.ndim == 3, rule.op, arg, "of shape (E, rows, columns)", tuple(weight.shape))
    if name == "fp8_block":
        block = weight.block_shape
        expect(block == (128, 128), rule.op, arg, "of blocks 128×128", block)
    return name


def _sizes(rule: Rule, experts: ExpertWeights, activation: Activation) -> Sizes:
    """The layer's sizes, from shapes that fit each other and the rule."""
    E, H, I = experts.down_proj.shape
    rows = (1 + activation.gated) * I
    wanted = {"gate_up_proj": (E, rows, H), "gate_up_bias": (E, rows), "down_bias": (E, H)}
    for arg, shape in wanted.items():
        value = getattr(experts, arg)
        if value is None:
            continue
        fits = tuple(value.shape) == shape
        fitting = f"of shape {shape} beside down_proj {(E, H, I)} for {activation.name}"
        expect(fits, rule.op, arg, fitting, tuple(value.shape))
        expect(rule.bias or "bias" not in arg, rule.op, arg, "None: its kernels add none", shape)
    wanted_size, got = rule.wanted_size(H, I, gated=activation.gated) or (None, 0)
    expect(wanted_size is None, rule.op, "down_proj", wanted_size or "", got)
    H_multiple, H_filled = rule.hidden
    I_multiple = rule.intermediate[0 if activation.gated else 1]
    padded_H = H if H % H_multiple == 0 else _multiple(H, H_filled or H_multiple)
    return Sizes(H, I, padded_H, _multiple(I, I_multiple))


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _filled(part: Tensor, *sizes: int) -> Tensor:
    """A copy with the last dimensions filled up to these sizes with zero bytes."""
    missing = [size - have for size, have in zip(sizes, part.shape[-len(sizes) :], strict=True)]
    filled = F.pad(as_bytes(part), [n for m in reversed(missing) for n in (0, m)])
    return filled.contiguous().view(part.dtype)
