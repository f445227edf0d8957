"""Expert layers for every recipe that prepares weights for FlashInfer."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

import tmoe
from tests.reference import fused_experts_ref
from tmoe.activation import Activation
from tmoe.backends.flashinfer import cutlass_weights, trtllm_weights
from tmoe.backends.flashinfer.weight_parts import Prepared
from tmoe.dispatch.prepared import ExpertWeights
from tmoe.formats import FORMATS, QuantizedTensor

recipes = SimpleNamespace(**vars(trtllm_weights) | vars(cutlass_weights))

A1, A2 = 0.125, 0.75  # static scales of the two inputs


SIZES = ([0.03, 0.1, 0.2], [2.0, 0.5, 1.0])  # of the experts' values, by projection

SWIGLU, RELU2, GEGLU = Activation("swiglu"), Activation("relu2"), Activation("geglu")
LIMITED, STEP = Activation.swiglu(limit=0.5), Activation.swiglu_step(limit=0.25)
OAI = Activation.swiglu_oai(alpha=1.702, limit=0.75)
FUSED = (SWIGLU, LIMITED, OAI, STEP, RELU2, GEGLU)


@dataclass(frozen=True)
class Case:
    recipe: str
    format: str  # of tmoe.quantize, or a dtype
    H: int
    I: int
    padded: tuple[int, int]  # H, and I with a gate
    ungated: int  # padded I without a gate
    activations: tuple[Activation, ...]
    bias: bool = False
    options: tuple = ()  # of the recipe

    def __str__(self) -> str:
        return "-".join((self.recipe, self.format, str(self.H), *(str(v) for _, v in self.options)))


SHUFFLED = (("use_shuffled_weight", True),)
BLOCKED = (*SHUFFLED, ("weight_layout", "BlockMajorK"))
CASES = [
    Case("trtllm_fp8_per_tensor", "fp8_tensor", 96, 40, (96, 48), 128, (SWIGLU, STEP, RELU2)),
    Case("trtllm_fp8_block", "fp8_block", 384, 256, (384, 256), 256, (SWIGLU,)),
    Case("trtllm_fp8_block", "fp8_block", 384, 256, (384, 256), 256, (SWIGLU,), False, SHUFFLED),
    Case("trtllm_fp8_block", "fp8_block", 384, 256, (384, 256), 256, (SWIGLU,), False, BLOCKED),
    Case("trtllm_mxfp8", "mxfp8", 96, 80, (256, 128), 128, FUSED),
    Case("trtllm_mxfp8", "mxfp8", 128, 128, (128, 128), 128, FUSED),
    Case("trtllm_fp4", "nvfp4", 160, 48, (256, 128), 128, FUSED, bias=True),
    Case("trtllm_fp4", "mxfp4", 288, 160, (512, 256), 256, FUSED, bias=True),
    Case("trtllm_bf16", "bfloat16", 64, 40, (64, 128), 128, (SWIGLU, LIMITED, OAI, STEP, RELU2)),
    Case("cutlass_bf16", "bfloat16", 24, 20, (24, 24), 24, FUSED, bias=True),
    Case("cutlass_bf16", "float16", 24, 24, (24, 24), 24, FUSED, bias=True),
    Case("cutlass_fp8_per_tensor", "fp8_tensor", 32, 40, (32, 48), 48, FUSED, bias=True),
    Case("cutlass_fp8_block", "fp8_block", 384, 256, (384, 256), 256, (SWIGLU,)),
    Case("cutlass_nvfp4", "nvfp4", 192, 48, (192, 64), 128, FUSED, bias=True),
    Case("cutlass_mxfp4", "mxfp4", 128, 48, (128, 128), 128, FUSED, bias=True),
]  # fmt: skip
ACTIVATION_TYPES = {  # FlashInfer's names
    "swiglu": "Swiglu", "swiglu_oai": "Swiglu", "swiglu_step": "SwigluStep", "geglu": "Geglu",
    "relu2": "Relu2",
}  # fmt: skip
OF = {case.recipe: case for case in CASES[::-1]}
LAYERS = [
    (case, activation, bias, interleaved)
    for case in CASES
    for activation in case.activations
    for bias in (False, True)[: 1 + case.bias]
    for interleaved in (False, True)[: 1 + (activation.gated and case.format != "fp8_block")]
]


def make(
    case: Case,
    activation: Activation,
    bias: bool = False,
    interleaved: bool = False,
    num_experts: int = 3,
) -> ExpertWeights:
    """A layer whose experts and projections are of different sizes, so that no two scales agree."""
    E = num_experts
    torch.manual_seed(case.H + case.I)
    rows = (1 + activation.gated) * case.I
    size13, size2 = (torch.tensor(s).repeat(E)[:E].view(-1, 1, 1) for s in SIZES)
    w13, w2 = torch.randn(E, rows, case.H) * size13, torch.randn(E, case.H, case.I) * size2
    if case.format in FORMATS:
        block = (128, 128) if case.format == "fp8_block" else None
        w13, w2 = (tmoe.quantize(w.bfloat16(), case.format, block_shape=block) for w in (w13, w2))
    else:
        w13, w2 = (w.to(getattr(torch, case.format)) for w in (w13, w2))
    biases = (torch.randn(E, rows).bfloat16(), torch.randn(E, case.H).bfloat16())
    static = case.format in ("fp8_tensor", "nvfp4")
    return ExpertWeights(
        w13, w2, activation, interleaved, *(biases if bias else (None, None)),
        *((A1, A2 * (1 + torch.arange(E) % 3)) if static else (None, None)),
    )  # fmt: skip


def prepared(case: Case, experts: ExpertWeights) -> Prepared:
    return getattr(recipes, case.recipe)(experts, **dict(case.options))


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
