"""Expert weights as FlashInfer's trtllm-gen kernels take them: a function per recipe, at load time.

Each takes an `ExpertWeights` and returns tensors and scalars by the entry point's keywords. Let a1
and a2 be the scales of the two projections' inputs, s13 and s2 those of the weights (real = code ·
scale).
From the codes' dot products acc, the kernels compute

    h = act(gate_scalar · acc_gate) · (acc_up + beta) · output1        gate_scalar = s13 a1
    y = (acc_down + bias) · output2                                    output2 = s2 a2

with output1 = s13 a1 / a2; without a gate, h = act(gate_scalar · acc) · output1, output1 = 1 / a2.
So h is in steps of a2, and what meets acc before its scale does (biases, beta, the limit) is
divided by that scale. Formats with nothing but block scales need no scalars.

A function raises ValueError (function, argument, wanted, got) for what its entry point can't
express, and looks at values: on a GPU it waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...checks import expect
from ...dispatch.prepared import ExpertWeights
from .layer import Layer, Rule
from .layouts import block_major, shuffle_rows, shuffle_scale_rows
from .weight_parts import (
    FP8_BLOCK,
    Maybe,
    Prepared,
    block_scales,
    codes,
    fp8_block,
    global_scales,
    input_scales,
    one_scale_per_expert,
    quantized,
)

TILE = 128  # rows of trtllm-gen's epilogues; 64 where the activation is a kernel of its own

_FEW = ("swiglu", "swiglu_step", "relu2")
_FUSED = ("swiglu", "swiglu_oai", "swiglu_step", "geglu", "relu2")
RULES = {
    rule.op: rule
    for rule in (
        Rule("trtllm_fp8_per_tensor", ("fp8_tensor",), _FEW, (32, None), (16, 128), limit=False),
        Rule("trtllm_fp8_block", *FP8_BLOCK, limit=False),
        Rule("trtllm_mxfp8", ("mxfp8",), _FUSED, (128, 256), (128, 128)),
        Rule("trtllm_fp4", ("nvfp4", "mxfp4"), _FUSED, (256, 256), (128, 128), bias=True),
        Rule("trtllm_bf16", ("bfloat16",), (*_FEW, "swiglu_oai"), (64, None), (128, 128)),
    )
}


@dataclass(frozen=True, slots=True)
class TrtllmFp8PerTensorWeights(Prepared):
    gemm1_weights: Tensor  # float8_e4m3fn (E, 2I or I, H), rows u0, g0, u1, g1, ..., shuffled
    gemm2_weights: Tensor  # float8_e4m3fn (E, H, I), shuffled
    output1_scales_gate_scalar: Tensor  # (E,) fp32, like all that follow
    output1_scales_scalar: Tensor
    output2_scales_scalar: Tensor
    gemm1_clamp_limit: Maybe  # divided by the gate scalar


@dataclass(frozen=True, slots=True)
class TrtllmFp8BlockWeights(Prepared):
    gemm1_weights: Tensor  # float8_e4m3fn (E, 2I, H), or (E, H/128, 2I, 128) if BlockMajorK
    gemm1_weights_scale: Tensor  # fp32 (E, 2I/128, H/128); MxFp8: uint8 (E, 2I, H/32) swizzled
    gemm2_weights: Tensor
    gemm2_weights_scale: Tensor
    gemm1_alpha: Maybe  # (E,) fp32 in natural units, like the two that follow
    gemm1_beta: Maybe
    gemm1_clamp_limit: Maybe
    use_shuffled_weight: bool
    weight_layout: str  # of WeightLayout
    fp8_quantization_type: str  # of Fp8QuantizationType


@dataclass(frozen=True, slots=True)
class TrtllmFp4Weights(Prepared):
    gemm1_weights: Tensor  # uint8 (E, 2I or I, H/2), rows u0, g0, u1, g1, ..., shuffled
    gemm1_weights_scale: Tensor  # viewed as float8_e4m3fn, (E, 2I or I, H/16 or H/32), swizzled
    gemm2_weights: Tensor
    gemm2_weights_scale: Tensor
    gemm1_bias: Maybe  # fp32 (E, 2I or I), (E, H), rows like the weights'
    gemm2_bias: Maybe
    gemm1_alpha: Maybe  # (E,) fp32, like all that follow
    gemm1_beta: Maybe
    gemm1_clamp_limit: Maybe
    output1_scale_gate_scalar: Maybe  # NVFP4's only
    output1_scale_scalar: Maybe
    output2_scale_scalar: Maybe


@dataclass(frozen=True, slots=True)
class TrtllmBf16Weights(Prepared):
    gemm1_weights: Tensor  # bf16 (E, H/64, 2I or I, 64), rows u0, g0, u1, g1, ..., shuffled
    gemm2_weights: Tensor  # bf16 (E, I/64, H, 64), shuffled
    gemm1_alpha: Maybe  # (E,) fp32 in natural units, like the two that follow
    gemm1_beta: Maybe
    gemm1_clamp_limit: Maybe
    use_shuffled_weight: bool = True
    weight_layout: str = "BlockMajorK"


def trtllm_fp8_per_tensor(experts: ExpertWeights) -> TrtllmFp8PerTensorWeights:
    """fp8_tensor. Where the scales of gate and up differ, both get codes under the larger one.

    H is a multiple of 32; I is filled up to one of 16, or of 128 without a gate.
    """
    layer = Layer.of(RULES["trtllm_fp8_per_tensor"], experts)
    (w13, s13), (w2, s2) = (one_scale_per_expert(q) for q in quantized(experts))
    gate, output1, output2 = _scalars(layer, s13, s2)
    limit = layer.constants()[2]
    return TrtllmFp8PerTensorWeights(
        layer.sizes,
        gemm1_weights=shuffle_rows(layer.fused(layer.fc1(w13)), TILE),
        gemm2_weights=shuffle_rows(layer.fc2(w2), TILE),
        output1_scales_gate_scalar=gate,
        output1_scales_scalar=output1,
        output2_scales_scalar=output2,
        gemm1_clamp_limit=None if limit is None else limit / gate,
    )


def trtllm_fp8_block(
    experts: ExpertWeights, *, use_shuffled_weight: bool = False, weight_layout: str = "MajorK"
) -> TrtllmFp8BlockWeights:
    """fp8_block, 128×128, H and I multiples of 128. Shuffled weights may be BlockMajorK. Rows stay
    [up; gate]: the activation is a kernel of its own, hence the other tile. So do the scales."""
    op = "trtllm_fp8_block"
    layer, scale13, scale2 = fp8_block(RULES[op], experts)
    layouts = ("MajorK", "BlockMajorK") if use_shuffled_weight else ("MajorK",)
    wanted = f"{' or '.join(layouts)} with use_shuffled_weight={use_shuffled_weight}"
    expect(weight_layout in layouts, op, "weight_layout", wanted, weight_layout)
    w13, w2 = codes(layer)
    if use_shuffled_weight:
        w13, w2 = shuffle_rows(w13, 64), shuffle_rows(w2, 64)
    if weight_layout == "BlockMajorK":
        w13, w2 = block_major(w13), block_major(w2)
    return TrtllmFp8BlockWeights(
        layer.sizes, w13, scale13, w2, scale2, *layer.constants(),
        use_shuffled_weight, weight_layout, "DeepSeekFp8",
    )  # fmt: skip


def trtllm_mxfp8(experts: ExpertWeights) -> TrtllmFp8BlockWeights:
    """mxfp8. H is filled up to a multiple of 256 unless it is one of 128; I to one of 128."""
    layer = Layer.of(RULES["trtllm_mxfp8"], experts)
    w13, scale13, w2, scale2 = _shuffled(layer)
    return TrtllmFp8BlockWeights(
        layer.sizes, w13, scale13, w2, scale2, *layer.constants(), True, "MajorK", "MxFp8"
    )


def trtllm_fp4(experts: ExpertWeights) -> TrtllmFp4Weights:
    """nvfp4, whose inputs have static global scales, or mxfp4, whatever its inputs are. H is filled
    up to a multiple of 256, I to one of 128."""
    layer = Layer.of(RULES["trtllm_fp4"], experts)
    w13, scale13, w2, scale2 = _shuffled(layer)
    bias13, bias2 = layer.biases(torch.float32)
    alpha, beta, limit = layer.constants()
    gate = output1 = output2 = None
    if layer.format == "nvfp4":
        gate, output1, output2 = _scalars(layer, *global_scales(layer))
        beta, limit = (None if value is None else value / gate for value in (beta, limit))
        bias13 = None if bias13 is None else bias13 / gate[:, None]
        bias2 = None if bias2 is None else bias2 / output2[:, None]
    return TrtllmFp4Weights(
        layer.sizes, w13, scale13.view(torch.float8_e4m3fn), w2, scale2.view(torch.float8_e4m3fn),
        gemm1_bias=None if bias13 is None else shuffle_rows(layer.fused(bias13), TILE),
        gemm2_bias=None if bias2 is None else shuffle_rows(bias2, TILE),
        gemm1_alpha=alpha, gemm1_beta=beta, gemm1_clamp_limit=limit,
        output1_scale_gate_scalar=gate, output1_scale_scalar=output1, output2_scale_scalar=output2,
    )  # fmt: skip


def trtllm_bf16(experts: ExpertWeights) -> TrtllmBf16Weights:
    """bf16. H is a multiple of 64; I is filled up to one of 128."""
    layer = Layer.of(RULES["trtllm_bf16"], experts)
    w13, w2 = codes(layer)
    return TrtllmBf16Weights(
        layer.sizes,
        block_major(shuffle_rows(layer.fused(w13), TILE)),
        block_major(shuffle_rows(w2, TILE)),
        *layer.constants(),
    )


def _shuffled(layer: Layer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of both projections as trtllm-gen's fused kernels want them."""
    (w13, w2), (scale13, scale2, size) = codes(layer), block_scales(layer)
    return (
        shuffle_rows(layer.fused(w13), TILE),
        shuffle_scale_rows(layer.fused(scale13), TILE, size),
        shuffle_rows(w2, TILE),
        shuffle_scale_rows(scale2, TILE, size),
    )


def _scalars(layer: Layer, s13: Tensor, s2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gate_scalar, output1 and output2 of this file's docstring, (E,) fp32."""
    a1, a2 = input_scales(layer)
    gate = s13 * a1
    output1 = gate / a2 if layer.activation.gated else (1 / a2).expand_as(gate).clone()
    return gate, output1, s2 * a2
