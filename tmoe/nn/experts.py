"""Experts: the expert weights, stacked, and the call to `tmoe.fused_experts`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..activation import Activation
from ..checks import expect, expect_tensor, expect_type
from ..formats import SCHEMES, QuantizedTensor
from ..ops import fused_experts, quantize
from .arguments import expect_flags, expect_parameter_dtype, expect_scheme_name, expect_sizes
from .lora import LORA, read_adapted


class Experts(nn.Module):
    """`num_experts` MLPs with stacked weights. Parameters, named and shaped as in transformers:

    * ``gate_up_proj`` (E, 2I, H), gate rows first; with ``interleaved=True`` g0, u0, g1, u1, ...
    * ``up_proj`` (E, I, H) in its place where the activation has no gate.
    * ``down_proj`` (E, H, I).
    * with ``bias=True`` also ``gate_up_proj_bias`` (E, 2I) or ``up_proj_bias`` (E, I), and
      ``down_proj_bias`` (E, H).

    gpt-oss, Aria and Llama 4 store both projections transposed: load ``.transpose(1, 2)``.

    With a scheme of `tmoe.formats.SCHEMES` the two weights are `QuantizedTensor`s without a
    gradient. They are made by ``Experts.quantized(experts, scheme)``, or filled with
    ``load_state_dict`` or ``copy_``. Static scales of the inputs are buffers, ``input_scale`` and
    ``hidden_scale``; without them each call computes its own.

    Under autocast the weights are cast at each call, which costs a copy of them; a layer whose
    parameters are 16-bit does not pay that.

    Source: the experts classes of transformers, for example ``Qwen3MoeExperts``.
    """

    gate_up_proj: nn.Parameter  # of a gated activation
    gate_up_proj_bias: nn.Parameter | None
    up_proj: nn.Parameter  # of another one
    up_proj_bias: nn.Parameter | None
    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None
    input_scale: Tensor | None
    hidden_scale: Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation = "swiglu",
        scheme: str | None = "bf16",
        bias: bool = False,
        interleaved: bool = False,
        weight_on_input: bool = False,
        input_scale: Tensor | None = None,
        hidden_scale: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`weight_on_input`: the routing weight multiplies an expert's input, not its output.
        `input_scale`, `hidden_scale`: as for `tmoe.fused_experts`, for fp8_tensor and nvfp4."""
        super().__init__()
        sizes = (num_experts, hidden_size, intermediate_size)
        names = ("num_experts", "hidden_size", "intermediate_size")
        expect_sizes("Experts", **dict(zip(names, sizes, strict=True)))
        expect_parameter_dtype("Experts", dtype)
        expect_flags("Experts", bias=bias, interleaved=interleaved, weight_on_input=weight_on_input)
        expect_scheme_name("Experts", scheme)
        takes_scales = scheme in SCHEMES and SCHEMES[scheme].takes_scales
        for arg, scale in (("input_scale", input_scale), ("hidden_scale", hidden_scale)):
            if scale is not None:
                expect_tensor(scale, "Experts", arg)
                expect(takes_scales, "Experts", arg, f"None for {scheme}", "a tensor")
                fits = scale.numel() == 1 or scale.shape == (num_experts,)
                wanted = f"one number or of shape ({num_experts},)"
                expect(fits, "Experts", arg, wanted, tuple(scale.shape))
                scale = scale.detach().to(device, torch.float32)
            self.register_buffer(arg, scale)
        self.activation = Activation.of(activation, "Experts")
        gated = self.activation.gated
        wanted = f"False for {self.activation.name}, which has no gate"
        expect(gated or not interleaved, "Experts", "interleaved", wanted, interleaved)
        self.num_experts, self.hidden_size, self.intermediate_size = sizes
        self.scheme = scheme
        self.interleaved = interleaved
        self.weight_on_input = weight_on_input

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        def weight(*shape: int) -> nn.Parameter:
            if scheme not in SCHEMES:
                return parameter(*shape)
            nominal = dtype or torch.get_default_dtype()
            recipe = SCHEMES[scheme].weights[0]
            empty = recipe.empty((num_experts, *shape), device=device, dtype=nominal)
            return nn.Parameter(empty, requires_grad=False)

        rows = 2 * intermediate_size if gated else intermediate_size
        self.register_parameter(self._first, weight(rows, hidden_size))
        self.down_proj = weight(hidden_size, intermediate_size)
        self.register_parameter(f"{self._first}_bias", parameter(rows) if bias else None)
        self.down_proj_bias = parameter(hidden_size) if bias else None
        self.reset_parameters()

    @property
    def _first(self) -> str:
        """The name of the first projection."""
        return "gate_up_proj" if self.activation.gated else "up_proj"

    def reset_parameters(self) -> None:
        """Initialise each expert as two `nn.Linear` would be."""
        for name, fan_in in (
            (self._first, self.hidden_size),
            ("down_proj", self.intermediate_size),
        ):
            bound = 1 / math.sqrt(fan_in)
            weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)
            if not isinstance(weight, QuantizedTensor):
                nn.init.uniform_(weight, -bound, bound)
            elif weight.device.type != "meta":
                values = torch.empty(weight.shape, device=weight.device).uniform_(-bound, bound)
                weight.copy_(quantize(values, weight.format, block_shape=weight.block_shape))

    @classmethod
    def quantized(
        cls,
        experts: Experts,
        scheme: str,
        *,
        input_scale: Tensor | None = None,
        hidden_scale: Tensor | None = None,
    ) -> Experts:
        """A layer with the weights of `experts` (not quantised) as the scheme has them, and with
        static scales of the inputs, if they are given; the biases are shared."""
        expect_type(experts, Experts, "Experts.quantized", "experts")
        wanted = "without adapters: merge and remove them first, or add them afterwards"
        expect(not hasattr(experts, LORA), "Experts.quantized", "experts", wanted, "some")
        result = cls(
            experts.num_experts,
            experts.hidden_size,
            experts.intermediate_size,
            activation=experts.activation,
            scheme=scheme,
            bias=experts.down_proj_bias is not None,
            interleaved=experts.interleaved,
            weight_on_input=experts.weight_on_input,
            input_scale=input_scale,
            hidden_scale=hidden_scale,
            device="meta",
            dtype=experts.down_proj.dtype,
        )
        for name in (result._first, "down_proj"):
            empty = getattr(result, name)
            weight = getattr(experts, name).detach()
            weight = quantize(weight, empty.format, block_shape=empty.block_shape)
            setattr(result, name, nn.Parameter(weight, requires_grad=False))
            setattr(result, f"{name}_bias", getattr(experts, f"{name}_bias"))
        for arg, scale in (("input_scale", input_scale), ("hidden_scale", hidden_scale)):
            if scale is not None:
                setattr(result, arg, scale.detach().to(weight.device, torch.float32))
        return result

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x (T, H), topk_ids (T, K) integers, topk_weights (T, K) -> (T, H) in the dtype of x.

        Ids outside [0, E) contribute nothing. Under autocast the result has autocast's dtype.
        """
        gate_up, gate_up_lora = read_adapted(self, self._first)
        down, down_lora = read_adapted(self, "down_proj")
        gate_up_bias, down_bias = getattr(self, f"{self._first}_bias"), self.down_proj_bias
        return fused_experts(
            x,
            gate_up,
            down,
            topk_weights,
            topk_ids,
            activation=self.activation,
            scheme=self.scheme,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            interleaved=self.interleaved,
            weight_on_input=self.weight_on_input,
            input_scale=self.input_scale,
            hidden_scale=self.hidden_scale,
            gate_up_lora=gate_up_lora,
            down_lora=down_lora,
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Experts:
        """Static scales go along to a device, and stay fp32 when the layer becomes bf16."""
        scales = {name: getattr(self, name) for name in ("input_scale", "hidden_scale")}
        super()._apply(fn, recurse)
        for name, scale in scales.items():
            if scale is not None and (moved := getattr(self, name)).dtype != torch.float32:
                setattr(self, name, scale.to(moved.device))
        return self

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, activation={self.activation}, "
            f"scheme={self.scheme}, bias={self.down_proj_bias is not None}, "
            f"interleaved={self.interleaved}, weight_on_input={self.weight_on_input}"
        )
