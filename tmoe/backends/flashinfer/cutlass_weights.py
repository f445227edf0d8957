"""Expert weights as FlashInfer's cutlass kernels take them: a function per recipe, for load time.

Each takes an `ExpertWeights` and returns tensors and scalars by `cutlass_fused_moe`'s keywords; a1,
a2, s13 and s2 are as in `trtllm_weights`. Biases, beta and limit are in natural units.

A function raises ValueError (function, argument, wanted, got) for what the entry point can't
express, and looks at values: on a GPU it waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...checks import expect
from ...dispatch.prepared import ExpertWeights
from ...formats import swizzle_scale
from .installed import interleave_w4_scales, interleave_w4_weights
from .layer import Layer, Rule
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

SMALLEST_BLOCK_SCALE = 1e-10  # a smaller one becomes NaN in cutlass's FP8 block kernel

_CUTLASS = (
    "swiglu", "swiglu_oai", "swiglu_step", "geglu", "geglu_tanh", "relu2", "silu", "gelu",
    "identity",
)  # fmt: skip
RULES = {
    rule.op: rule
    for rule in (
        Rule("cutlass_bf16", ("bfloat16", "float16"), _CUTLASS, (8, None), (8, 8), bias=True),
        Rule("cutlass_fp8_per_tensor", ("fp8_tensor",), _CUTLASS, (16, None), (16, 16), bias=True),
        Rule("cutlass_fp8_block", *FP8_BLOCK, limit=False),
        Rule("cutlass_nvfp4", ("nvfp4",), _CUTLASS, (64, None), (64, 128), bias=True),
        Rule("cutlass_mxfp4", ("mxfp4",), _CUTLASS, (128, None), (128, 128), bias=True),
        Rule("cutlass_mxfp4_a16", ("mxfp4",), _CUTLASS, (128, 128), (128, 128), bias=True),
    )
}


@dataclass(frozen=True, slots=True)
class CutlassWeights(Prepared):
    fc1_expert_weights: Tensor  # (E, 2I or I, H), rows [up; gate]; 4-bit: int64 (..., H/16)
    fc2_expert_weights: Tensor  # (E, H, I)
    output_dtype: torch.dtype
    quant_scales: list[Tensor]
    fc1_expert_biases: Maybe  # of output_dtype, (E, 2I or I) and (E, H)
    fc2_expert_biases: Maybe
    swiglu_alpha: Maybe  # (E,) fp32 in natural units, like the two that follow
    swiglu_beta: Maybe
    swiglu_limit: Maybe
    use_deepseek_fp8_block_scale: bool = False
    use_mxfp8_act_scaling: bool = False
    use_w4_group_scaling: bool = False


def cutlass_bf16(experts: ExpertWeights) -> CutlassWeights:
    """bf16 or fp16, without quant_scales. H is a multiple of 8; I is filled up to one of 8."""
    layer = Layer.of(RULES["cutlass_bf16"], experts)
    return _cutlass(layer, *codes(layer), [], experts.down_proj.dtype)


def cutlass_fp8_per_tensor(
    experts: ExpertWeights, output_dtype: torch.dtype = torch.bfloat16
) -> CutlassWeights:
    """fp8_tensor, requantised as in `trtllm_fp8_per_tensor`. H is a multiple of 16; I is filled up
    to one of 16.

    quant_scales: s13 · a1 (E,), 1 / a2 (0-d or (E,)), s2 · a2 (E,), a1 (0-d).
    """
    layer = Layer.of(RULES["cutlass_fp8_per_tensor"], experts)
    (w13, s13), (w2, s2) = (one_scale_per_expert(q) for q in quantized(experts))
    a1, a2 = input_scales(layer)
    scales = [s13 * a1, 1 / a2, s2 * a2, a1]
    return _cutlass(layer, layer.fc1(w13), layer.fc2(w2), scales, output_dtype)


def cutlass_fp8_block(
    experts: ExpertWeights, output_dtype: torch.dtype = torch.bfloat16
) -> CutlassWeights:
    """fp8_block, 128×128, H and I multiples of 128. Scales below 1e-10 become that.

    quant_scales, fp32: (E, 2I/128, H/128) up first, (E, H/128, I/128).
    """
    layer, *scales = fp8_block(RULES["cutlass_fp8_block"], experts)
    scales = [scale.clamp(min=SMALLEST_BLOCK_SCALE) for scale in scales]
    return _cutlass(layer, *codes(layer), scales, output_dtype, use_deepseek_fp8_block_scale=True)


def cutlass_nvfp4(
    experts: ExpertWeights, output_dtype: torch.dtype = torch.bfloat16
) -> CutlassWeights:
    """nvfp4; each input scale is one number or (E,). H is a multiple of 64; I is filled up to one
    of 64, or of 128 without a gate.

    quant_scales: 1 / a1 (0-d or (E,)), swizzled block scales as int32 (E, 2I, H/64), s13 · a1 (E,),
    and the same for the other projection, whose scales have rows up to a multiple of 128.
    """
    layer = Layer.of(RULES["cutlass_nvfp4"], experts)
    (s13, s2), (a1, a2) = global_scales(layer), input_scales(layer, per_expert=True)
    scale13, scale2 = _swizzled(layer)
    scales = [1 / a1, scale13, s13 * a1, 1 / a2, scale2, s2 * a2]
    return _cutlass(layer, *codes(layer, torch.int64), scales, output_dtype)


def cutlass_mxfp4(
    experts: ExpertWeights, output_dtype: torch.dtype = torch.bfloat16
) -> CutlassWeights:
    """mxfp4 whose inputs are mxfp8. H is a multiple of 128; I is filled up to one of 128.

    quant_scales: swizzled block scales as int32 (E, 2I, H/128), ones (E,), and the same for the
    other projection.
    """
    layer = Layer.of(RULES["cutlass_mxfp4"], experts)
    scale13, scale2 = _swizzled(layer)
    ones = torch.ones(scale2.shape[0], dtype=torch.float32, device=scale2.device)
    scales = [scale13, ones, scale2, ones.clone()]
    return _cutlass(
        layer, *codes(layer, torch.int64), scales, output_dtype, use_mxfp8_act_scaling=True
    )


def cutlass_mxfp4_a16(experts: ExpertWeights) -> CutlassWeights:
    """mxfp4 whose inputs are bf16, on Hopper. H and I are filled up to multiples of 128.

    The order of codes and scales differs between FlashInfer's versions, so the installed one's own
    helpers make it, on the GPU. quant_scales: the scales of both projections as int32.
    """
    layer = Layer.of(RULES["cutlass_mxfp4_a16"], experts)
    w13, w2 = (interleave_w4_weights(w) for w in codes(layer))
    scale13, scale2, size = block_scales(layer)
    scales = [interleave_w4_scales(scale, size).view(torch.int32) for scale in (scale13, scale2)]
    return _cutlass(layer, w13, w2, scales, torch.bfloat16, use_w4_group_scaling=True)


def _swizzled(layer: Layer) -> tuple[Tensor, Tensor]:
    """Block scales of both projections as cutlass wants them, four to an int32."""
    scale13, scale2, _ = block_scales(layer)
    return swizzle_scale(scale13).view(torch.int32), swizzle_scale(scale2).view(torch.int32)


def _cutlass(
    layer: Layer,
    w13: Tensor,
    w2: Tensor,
    quant_scales: list[Tensor],
    output_dtype: torch.dtype,
    **flags: Any,
) -> CutlassWeights:
    dtypes = (torch.bfloat16, torch.float16)
    expect(output_dtype in dtypes, layer.op, "output_dtype", "bfloat16 or float16", output_dtype)
    biases, constants = layer.biases(output_dtype), layer.constants()
    return CutlassWeights(
        layer.sizes, w13, w2, output_dtype, quant_scales, *biases, *constants, **flags
    )
