"""One call of a FlashInfer entry point by hand: its keywords, and the answer it must give."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tmoe
from tests.backends.flashinfer.cases import (
    A1,
    A2,
    ACTIVATION_TYPES,
    CASES,
    OAI,
    STEP,
    SWIGLU,
    Case,
    make,
    prepared,
)
from tests.backends.flashinfer.stand_in import Fake
from tests.backends.flashinfer.stand_in.schemes import SCHEMES as SCHEMES_OF_TRTLLM
from tests.reference import activation_ref, rounded
from tmoe.activation import Activation
from tmoe.backends.flashinfer.weight_parts import Prepared
from tmoe.dispatch.prepared import ExpertWeights
from tmoe.formats import SCHEMES, QuantizedTensor, swizzle_scale

E, K, T = 8, 2, 5
ENTRY_POINTS = {  # by recipe
    "trtllm_fp8_per_tensor": "trtllm_fp8_per_tensor_scale_routed_moe",
    "trtllm_fp8_block": "trtllm_fp8_block_scale_routed_moe",
    "trtllm_mxfp8": "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp4": "trtllm_fp4_block_scale_routed_moe",
    "trtllm_bf16": "trtllm_bf16_routed_moe",
}
# Schemes of tmoe by recipe and format, and whether the function quantises the inputs.
INPUTS = {
    ("trtllm_fp8_per_tensor", "fp8_tensor"): ("fp8_tensor",),
    ("trtllm_fp8_block", "fp8_block"): ("fp8_block",),
    ("trtllm_mxfp8", "mxfp8"): ("mxfp8",),
    ("trtllm_fp4", "nvfp4"): ("nvfp4",),
    ("trtllm_fp4", "mxfp4"): ("mxfp4_a8", "mxfp4_a16"),
    ("trtllm_bf16", "bfloat16"): ("bf16",),
    ("cutlass_bf16", "bfloat16"): ("bf16",),
    ("cutlass_bf16", "float16"): ("bf16",),
    ("cutlass_fp8_per_tensor", "fp8_tensor"): ("fp8_tensor",),
    ("cutlass_fp8_block", "fp8_block"): ("fp8_block inside",),
    ("cutlass_nvfp4", "nvfp4"): ("nvfp4 inside", "nvfp4", "nvfp4 swizzled"),
    ("cutlass_mxfp4", "mxfp4"): ("mxfp4_a8", "mxfp4_a8 swizzled"),
}


def dtype_of(case: Case) -> torch.dtype:
    """Of the layer's input and output."""
    return torch.float16 if case.format == "float16" else torch.bfloat16


@dataclass(frozen=True)
class Tokens:
    """Tokens and their experts; the weights are exact in bf16 unless a test changes them."""

    x: Tensor  # (T, H) bf16 or fp16
    weights: Tensor  # (T, K) fp32
    ids: Tensor  # (T, K) int32

    @classmethod
    def of(cls, case: Case, num: int = T, k: int = K) -> Tokens:
        """Some weights are negative, as a packed pair must be able to hold."""
        x = torch.randn(num, case.H).to(dtype_of(case))
        weights = torch.randn(num, k).bfloat16().float()
        ids = torch.rand(num, E).argsort(1)[:, :k].int()
        return cls(x, weights, ids)


def packed(ids: Tensor, weights: Tensor) -> Tensor:
    """The expert in the high half of an int32, the bits of its bf16 weight in the low one."""
    low = weights.bfloat16().view(torch.int16).int() & 0xFFFF
    return ids.int() << 16 | low


def call_of(
    fake: Fake, case: Case, made: Prepared, activation: Activation, inputs: str, tokens: Tokens
) -> tuple[str, dict[str, Any], Tensor]:
    """The entry point, its keywords, and x as it is quantised, in fp64."""
    scheme, _, how = inputs.partition(" ")
    x = F.pad(tokens.x, (0, made.sizes.padded_hidden - tokens.x.shape[1]))
    q = _quantized(x, scheme)
    seen = x.double() if q is None else q.dequantize().double()
    keywords = made.keywords()
    keywords["activation_type"] = fake.enums["ActivationType"][ACTIVATION_TYPES[activation.name]]
    if "cutlass" in case.recipe:
        plain = q is None or how == "inside"
        keywords |= {
            "input": x if plain else q.data,
            "token_selected_experts": tokens.ids,
            "token_final_scales": tokens.weights,
            "nvfp4_4over6": None,
        }
        if not plain and scheme != "fp8_tensor":
            scale = q.scale.view(torch.uint8)
            swizzled = how == "swizzled"
            keywords["input_sf"] = swizzle_scale(scale) if swizzled else scale
            keywords["swizzled_input_sf"] = swizzled
        return "cutlass_fused_moe", keywords, seen[:, : case.H]
    for name in ("weight_layout", "fp8_quantization_type"):
        if name in keywords:
            enum = {"weight_layout": "WeightLayout"}.get(name, "Fp8QuantizationType")
            keywords[name] = fake.enums[enum][keywords[name]]
    keywords |= {
        "topk_ids": (tokens.ids, tokens.weights),
        "routing_method_type": fake.enums["RoutingMethodType"].TopK,
        "hidden_states": x if q is None else q.data,
        "num_experts": E,
        "top_k": tokens.ids.shape[1],
        "n_group": 0,
        "topk_group": 0,
        "routed_scaling_factor": None,
        "intermediate_size": made.sizes.padded_intermediate,
        "local_expert_offset": 0,
        "local_num_experts": len(made.gemm2_weights),
    }
    if "bf16" not in case.recipe:
        keywords["routing_bias"] = None
    if "per_tensor" in case.recipe:
        keywords = {name: v for name, v in keywords.items() if v is not None or "limit" not in name}
        keywords["use_routing_scales_on_input"] = False
    elif "bf16" not in case.recipe:
        scale = None if q is None else q.scale
        keywords["hidden_states_scale"] = scale.T.contiguous() if scheme == "fp8_block" else scale
    if scheme == "nvfp4":
        keywords["nvfp4_4over6"] = None
    return ENTRY_POINTS[case.recipe], keywords, seen[:, : case.H]


def _quantized(x: Tensor, scheme: str) -> QuantizedTensor | None:
    """As a caller quantises it, or the function."""
    if scheme in ("bf16", "mxfp4_a16"):
        return None
    recipe = SCHEMES[scheme].inputs
    static = {"fp8_tensor": {"scale": A1}, "nvfp4": {"global_scale": A1}}.get(scheme, {})
    return tmoe.quantize(x, recipe.format.name, block_shape=recipe.block_shape, **static)


def truth(
    case: Case, experts: ExpertWeights, inputs: str, x: Tensor, tokens: Tokens,
    *, first_expert: int = 0, on_input: bool = False, down_bias: bool = True,
) -> Tensor:  # fmt: skip
    """(T, H) in fp64: one (token, slot) pair at a time, rounded where the kernels round. x (T, H)
    as `call_of` returns it."""
    a, scheme = Activation.of(experts.activation), inputs.partition(" ")[0]
    w13, w2 = (
        (w.dequantize() if isinstance(w, QuantizedTensor) else w).double()
        for w in (experts.gate_up_proj, experts.down_proj)
    )
    recipe = SCHEMES[scheme].inputs if scheme not in ("bf16", "mxfp4_a16") else None
    dtype = dtype_of(case)
    out = torch.zeros(len(x), w2.shape[1], dtype=torch.float64)
    for t, (ids, weights) in enumerate(zip(tokens.ids.tolist(), tokens.weights, strict=True)):
        for expert, weight in zip(ids, weights.double(), strict=True):
            e = expert - first_expert
            if not 0 <= e < len(w2):
                continue
            acc = w13[e] @ x[t] * (weight if on_input else 1)
            if case.recipe == "trtllm_fp8_block":
                acc = rounded(acc[None], recipe)[0]
            elif "cutlass" in case.recipe:
                acc = acc.to(dtype).double()
            if experts.gate_up_bias is not None:
                acc = acc + experts.gate_up_bias[e].double()
            halves = acc.unflatten(0, (-1, 2)).T if experts.interleaved else acc.chunk(2)
            gate, up = halves if a.gated else (acc, None)
            h = activation_ref(gate, up, a.name, a.alpha, a.limit)
            static = scheme in ("fp8_tensor", "nvfp4")
            h = (
                h.to(dtype).double()
                if recipe is None
                else rounded(h[None], recipe, A2 * (1 + e % 3) * torch.ones(()) if static else None)
            )
            y = w2[e] @ h.flatten()
            if experts.down_bias is not None and down_bias:
                y = y + experts.down_bias[e].double()
            out[t] += y if on_input else weight * y
    return out


# Of the answer's own: what is left by casting an expert's answer and the sum to bf16, and by a code
# of the intermediate that falls on the other side of a tie.
RMS, LARGEST = 2**-8, 2**-6


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Root mean square and largest, as multiples of what is allowed; infinite where NaN is."""
    error = (got.double() - want).nan_to_num(math.inf, math.inf, math.inf)
    rms = error.square().mean().sqrt() / want.square().mean().sqrt() / RMS
    return float(rms), float(error.abs().max() / want.abs().max() / LARGEST)


def run(op: str, keywords: dict[str, Any]) -> Tensor:
    """Call FlashInfer's function; its only result."""
    result = getattr(importlib.import_module("flashinfer.fused_moe"), op)(**keywords)
    return result[0] if isinstance(result, list) else result


def has_kernel(case: Case, activation: Activation, inputs: str) -> bool:
    """FlashInfer's tests cover this activation; tmoe's recipes prepare weights for more."""
    scheme = inputs.partition(" ")[0]
    names = SCHEMES_OF_TRTLLM[scheme].activations
    return "cutlass" in case.recipe or ACTIVATION_TYPES[activation.name] in names


@dataclass(frozen=True)
class Example:
    """A right call that uses as many arguments as it can: biases, alpha, beta, limit."""

    case: Case
    activation: Activation
    experts: ExpertWeights
    inputs: str
    tokens: Tokens
    op: str
    keywords: dict[str, Any]
    x: Tensor  # as `call_of` returns it

    @classmethod
    def of(
        cls, fake: Fake, case: Case, inputs: str, activation: Activation | None = None,
        num: int = T, k: int = K,
    ) -> Example:  # fmt: skip
        best = (a for a in (OAI, STEP, SWIGLU) if a in case.activations)
        activation = activation or next(a for a in best if has_kernel(case, a, inputs))
        experts = make(case, activation, case.bias, num_experts=E)
        tokens, made = Tokens.of(case, num, k), prepared(case, experts)
        op, keywords, x = call_of(fake, case, made, activation, inputs, tokens)
        return cls(case, activation, experts, inputs, tokens, op, keywords, x)

    def truth(self, tokens: Tokens | None = None, **options: Any) -> Tensor:
        return truth(self.case, self.experts, self.inputs, self.x, tokens or self.tokens, **options)

    def run(self, **changes: Any) -> Tensor:
        """(T, H), without what is filled up."""
        return run(self.op, self.keywords | changes)[:, : self.case.H]

    def error(self, got: Tensor, **options: Any) -> float:
        """1 is what is allowed."""
        return max(errors(got, self.truth(**options)))


# The variants of inputs for every recipe, at sizes that are filled up anyway.
VARIANTS = [
    (replace(case, H=256, I=128) if case.format in ("fp8_block", "mxfp4") else case, inputs)
    for case in CASES
    for inputs in INPUTS[case.recipe, case.format]
]
