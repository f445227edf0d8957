"""What FlashInfer's entry points compute, by hand and in fp64, from what they are given.

The arithmetic follows FlashInfer's documentation of them and uses nothing of what it tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.backends.flashinfer import undo
from tests.reference import activation_ref, fused_experts_ref
from tmoe.activation import Activation
from tmoe.dispatch.prepared import ExpertWeights
from tmoe.formats import QuantizedTensor


@dataclass(frozen=True)
class Kernel:
    """What an entry point computes with. Scalars are one number, or one per expert."""

    gate_up: Tensor  # fp64 (E, 2I or I, H), rows [gate; up], without per-expert scales
    down: Tensor  # fp64 (E, H, I)
    input: Tensor | float  # x is multiplied with this before the first product,
    first: Tensor | float  # the first product with this,
    hidden: Tensor | float  # the activation's result with this,
    second: Tensor | float  # and the second product with this
    natural: bool  # biases, beta and limit meet the products after `first` and `second`, or before
    biases: tuple[Tensor | None, Tensor | None]
    constants: tuple[Tensor | None, Tensor | None, Tensor | None]  # alpha, beta, limit

    def run(self, x: Tensor, activation: Activation) -> Tensor:
        """x (T, H) fp64 -> (E, T, H): every expert's answer to every token."""

        def each(value: Tensor | float | None, default: float = 0.0) -> Tensor:
            value = torch.as_tensor(default if value is None else value, dtype=torch.float64)
            return value[:, None] if value.ndim == 2 else value.reshape(-1, 1, 1)

        first, second = each(self.first), each(self.second)
        unit1, unit2 = (1.0, 1.0) if self.natural else (first, second)
        x = torch.nn.functional.pad(x, (0, self.gate_up.shape[-1] - x.shape[-1]))
        acc = (x * each(self.input)) @ self.gate_up.mT * first + each(self.biases[0]) * unit1
        alpha = each(self.constants[0], 1.0)
        beta, limit = each(self.constants[1]) * unit1, each(self.constants[2], math.inf) * unit1
        if activation.gated:
            gate, up = acc.chunk(2, dim=-1)
            up = torch.maximum(torch.minimum(up, limit), -limit) + beta
            if activation.name in ("swiglu", "swiglu_oai"):
                gate = torch.minimum(gate, limit)
                gate = gate / (1 + torch.exp(-alpha * gate))
            elif activation.name == "swiglu_step":
                gate = torch.minimum(gate / (1 + torch.exp(-gate)), limit)
            else:
                gate = activation_ref(gate, None, "gelu", 1.0, math.inf)
            h = gate * up
        else:
            h = activation_ref(acc, None, activation.name, 1.0, math.inf)
        return (h * each(self.hidden)) @ self.down.mT * second + each(self.biases[1]) * unit2


def dequantized(experts: ExpertWeights, x: Tensor) -> Tensor:
    """The dequantised layer in fp64: (E, T, H), every expert's answer to every token."""
    E, T = len(experts.gate_up_proj), len(x)
    a, weights = Activation.of(experts.activation), (experts.gate_up_proj, experts.down_proj)
    y = fused_experts_ref(
        x.repeat_interleave(E, dim=0),
        *(w.dequantize() if isinstance(w, QuantizedTensor) else w for w in weights),
        torch.ones(E * T, 1), torch.arange(E).repeat(T)[:, None],
        activation=a.name, alpha=a.alpha, limit=a.limit, interleaved=experts.interleaved,
        gate_up_bias=experts.gate_up_bias, down_bias=experts.down_bias,
    )  # fmt: skip
    return y.unflatten(0, (T, E)).transpose(0, 1)


def of_trtllm(made, format: str, activation: Activation, input_scale: float) -> Kernel:
    """What a trtllm-gen entry point computes with, from what it is given. Inputs of per-tensor FP8
    are quantised with `input_scale` before."""
    gated, made = activation.gated, made.keywords()
    tile = 64 if format == "fp8_block" else 128
    matrices, biases = [], []
    for name in ("gemm1", "gemm2"):
        w, scale = made[f"{name}_weights"], made.get(f"{name}_weights_scale")
        if made.get("weight_layout") == "BlockMajorK":
            w = undo.unblocked(w)
        if scale is not None and format != "fp8_block":
            scale = undo.unshuffled(undo.unswizzled(scale, w, format), tile)
        if made.get("use_shuffled_weight", True):
            w = undo.unshuffled(w, tile)
        bias = made.get(f"{name}_bias")
        bias = None if bias is None else undo.unshuffled(bias, tile)
        if name == "gemm1" and gated:
            ordered = undo.gate_first if format == "fp8_block" else undo.gate_up_of_fused
            w, scale, bias = (None if part is None else ordered(part) for part in (w, scale, bias))
        matrices.append(undo.values_of(w, scale, format))
        biases.append(bias)
    scalars = dict.fromkeys(("input", "first", "hidden", "second"), 1.0)
    name = "output{}_scales_{}" if format == "fp8_tensor" else "output{}_scale_{}"
    if made.get(name.format(1, "scalar")) is not None:
        first, hidden = made[name.format(1, "gate_scalar")], made[name.format(1, "scalar")]
        scalars = {
            "input": 1 / input_scale,
            "first": first,
            "second": made[name.format(2, "scalar")],
        }
        # With a gate it stands in for the scale of acc's up half, too.
        scalars["hidden"] = hidden.double() / first.double() if gated else hidden
    constants = tuple(made.get(f"gemm1_{c}") for c in ("alpha", "beta", "clamp_limit"))
    return Kernel(*matrices, **scalars, natural=False, biases=tuple(biases), constants=constants)


def of_cutlass(made, format: str, activation: Activation) -> Kernel:
    """What `cutlass_fused_moe` computes with, from what it is given."""
    scales, gated = made.quant_scales, activation.gated
    block_scales = {"nvfp4": (1, 4), "mxfp4": (0, 2), "fp8_block": (0, 1)}.get(format)
    matrices = []
    for place, w in enumerate((made.fc1_expert_weights, made.fc2_expert_weights)):
        scale = None if block_scales is None else scales[block_scales[place]]
        if format in undo.PER_BYTE:
            w = w.view(torch.uint8)
            scale = undo.unswizzled(scale, w, format)
        if place == 0 and gated:
            w, scale = undo.gate_first(w), None if scale is None else undo.gate_first(scale)
        matrices.append(undo.values_of(w, scale, format))
    scalars = (1.0, 1.0, 1.0, 1.0)
    if format == "fp8_tensor":
        scalars = (1 / scales[3], *scales[:3])
    elif format == "nvfp4":
        scalars = (scales[0], *scales[2:4], scales[5])
    elif format == "mxfp4":
        scalars = (1.0, scales[1], 1.0, scales[3])
    bias1, bias2 = made.fc1_expert_biases, made.fc2_expert_biases
    biases = (undo.gate_first(bias1) if bias1 is not None and gated else bias1, bias2)
    constants = (made.swiglu_alpha, made.swiglu_beta, made.swiglu_limit)
    return Kernel(*matrices, *scalars, natural=True, biases=biases, constants=constants)
