"""One call of FlashInfer's expert layers: tokens quantised and filled up, everything by keyword.

tmoe routes, so an entry point gets ids and weights, never logits: numerics of the router are the
same on every device, and FlashInfer's methods, their limits and their history don't matter. Where
the weight scales an expert's input, only the method Llama4 says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...activation import Activation
from ...dispatch.problem import ExpertsSpec
from ...formats.compute import quantize_parts
from ...formats.format import FLOAT32
from ...formats.recipe import Recipe
from ...formats.scheme import SCHEMES
from ...routing import pack_topk
from . import installed
from .cutlass_weights import CutlassWeights
from .weight_parts import Prepared

TUNE_MAX_TOKENS = 8192  # the same in every call, or tuned sizes would differ between calls
ACTIVATION_TYPES = {
    "swiglu": "Swiglu",  # with alpha, beta and limit, if they are given
    "swiglu_oai": "Swiglu",
    "swiglu_step": "SwigluStep",
    "geglu": "Geglu",
    "geglu_tanh": "GegluTanh",
    "relu2": "Relu2",
    "silu": "Silu",
    "gelu": "Gelu",
    "identity": "Identity",
}
ENUMS = {  # of keywords whose value is a member's name
    "weight_layout": "WeightLayout",
    "fp8_quantization_type": "Fp8QuantizationType",
}


@dataclass(frozen=True, slots=True)
class Ready:
    """A layer's weights for an entry point, and what a call needs beside them."""

    entry_point: str
    weights: Prepared
    keywords: dict[str, Any]  # of every call
    optional: dict[str, Any]  # the same, for functions that have them
    num_local: int  # experts
    input_scale: Tensor | None  # static, of the first projection's input
    packs_ids: bool  # ids and weights are passed as one tensor

    @classmethod
    def of(
        cls, entry_point: str, weights: Prepared, activation: Activation, num_local: int,
        input_scale: Tensor | None, packs_ids: bool,
    ) -> Ready:  # fmt: skip
        keywords = {
            name: installed.member(ENUMS[name], value) if name in ENUMS else value
            for name, value in weights.keywords().items()
        }
        # Functions that can't have these constants are called only where there are none.
        constants = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
        optional = {name: keywords.pop(name) for name in constants if name in keywords}
        optional["nvfp4_4over6"] = None  # else an environment variable would change the numbers
        if not isinstance(weights, CutlassWeights):
            optional["hidden_states_scale_layout"] = installed.member("SfLayout", "layout_linear")
        type_of_activation = ACTIVATION_TYPES[activation.name]
        keywords["activation_type"] = installed.member("ActivationType", type_of_activation)
        keywords["tune_max_num_tokens"] = TUNE_MAX_TOKENS
        return cls(entry_point, weights, keywords, optional, num_local, input_scale, packs_ids)

    def tensors(self) -> list[Tensor]:
        """All that is held for the layer."""
        values: list[Any] = [self.input_scale]
        for value in self.weights.keywords().values():
            values += value if isinstance(value, list) else [value]
        return [value for value in values if isinstance(value, Tensor)]


def call_experts(
    ready: Ready, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, spec: ExpertsSpec,
    out: Tensor, *, deterministic: bool,
) -> Tensor:  # fmt: skip
    """x (T, H) in out's dtype -> `out` (T, H), written and returned."""
    # FP4's last step leaves out the columns that were filled up; others want all of them.
    width = ready.weights.sizes.padded_hidden
    truncates = width == out.shape[1] or ready.entry_point.startswith("trtllm_fp4")
    output = out if truncates else out.new_empty(len(out), width)
    x = x.contiguous() if width == x.shape[1] else F.pad(x, (0, width - x.shape[1]))
    topk = topk_ids.int().contiguous(), topk_weights.float().contiguous()
    if isinstance(ready.weights, CutlassWeights):
        keywords = ready.keywords | _cutlass_keywords(ready, x, topk, spec)
        keywords["use_fused_finalize"] = not deterministic  # it adds up with atomics
    else:
        keywords = ready.keywords | _trtllm_keywords(ready, x, topk, spec)
    result: Tensor = installed.call(
        ready.entry_point, keywords, ready.optional | {"output": output}
    )
    return out if result.data_ptr() == out.data_ptr() else out.copy_(result[:, : out.shape[1]])


def _trtllm_keywords(
    ready: Ready, x: Tensor, topk: tuple[Tensor, Tensor], spec: ExpertsSpec
) -> dict[str, Any]:
    method = "Llama4" if spec.weight_on_input else "TopK"
    keywords: dict[str, Any] = {
        "topk_ids": pack_topk(*topk) if ready.packs_ids else topk,
        "routing_method_type": installed.member("RoutingMethodType", method),
        "num_experts": spec.num_experts,
        "top_k": topk[0].shape[1],
        "n_group": 0,
        "topk_group": 0,
        "routed_scaling_factor": None,  # part of the weights already
        "intermediate_size": ready.weights.sizes.padded_intermediate,
        "local_expert_offset": spec.first_expert,
        "local_num_experts": ready.num_local,
        "do_finalize": True,
        "hidden_states": x,
    }
    if ready.entry_point != "trtllm_bf16_routed_moe":
        keywords["routing_bias"] = None
    inputs = None if spec.scheme is None else SCHEMES[spec.scheme].inputs
    if inputs is not None:
        keywords["hidden_states"], scale = _quantized(x, ready, inputs)
    if ready.entry_point == "trtllm_fp8_per_tensor_scale_routed_moe":
        keywords["use_routing_scales_on_input"] = spec.weight_on_input
    elif inputs is None and spec.scheme is not None:
        keywords["hidden_states_scale"] = None
    elif inputs is not None:  # linear; of blocks of 128: (H/128, T)
        of_blocks = inputs.format.scale is FLOAT32
        keywords["hidden_states_scale"] = scale.t().contiguous() if of_blocks else scale
    return keywords


def _cutlass_keywords(
    ready: Ready, x: Tensor, topk: tuple[Tensor, Tensor], spec: ExpertsSpec
) -> dict[str, Any]:
    """What isn't quantised here, is quantised inside. A window is the rank of one of equal ones."""
    keywords: dict[str, Any] = {
        "input": x,
        "input_sf": None,
        "token_selected_experts": topk[0],
        "token_final_scales": topk[1],
        "ep_size": spec.num_experts // ready.num_local,
        "ep_rank": spec.first_expert // ready.num_local,
        "tp_size": 1,
        "tp_rank": 0,
        "swizzled_input_sf": False,
    }
    if spec.scheme in ("fp8_tensor", "mxfp4_a8"):
        inputs = SCHEMES[spec.scheme].inputs
        assert inputs is not None
        keywords["input"], scale = _quantized(x, ready, inputs)
        if spec.scheme == "mxfp4_a8":
            keywords["input_sf"] = scale
    return keywords


def _quantized(x: Tensor, ready: Ready, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Codes of x and their scales, linear, under the layer's static scale if it has one."""
    static, is_global = ready.input_scale, recipe.format.has_global_scale
    codes, scale, _ = quantize_parts(
        x, recipe, None if is_global else static, static if is_global else None
    )
    return codes, scale
