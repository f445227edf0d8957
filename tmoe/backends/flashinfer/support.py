"""Which of FlashInfer's entry points could run an expert layer, and why not: all from facts.

An entry point may take our arguments long before its results are right for them, so what counts is
the version in which the last fault that would meet us was mended, a post release included. Devices
are compared exactly: FlashInfer's own checks let some pass whose kernels then fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from packaging.version import Version

from ...activation import Activation
from ...dispatch.problem import Problem
from . import cutlass_weights, trtllm_weights
from .calls import ACTIVATION_TYPES
from .signatures import binds, enum_members, known_version, signature

Capabilities = tuple[tuple[int, int], ...]
BLACKWELL: Capabilities = ((10, 0), (10, 3))
MOST_TOKENS = 300_000  # NVFP4 reads illegal addresses from about 305,000 on
MOST_EXPERTS, MOST_TOP_K = 2048, 32  # that the sort of given ids is compiled for

_WINDOW = "num_experts top_k intermediate_size local_expert_offset local_num_experts".split()
# Schemes whose inputs have static scales, which prepared weights contain.
STATIC = ("fp8_tensor", "nvfp4")

_TRTLLM = ["topk_ids", "routing_method_type", "do_finalize", "tune_max_num_tokens", *_WINDOW]
_GROUPED = ["n_group", "topk_group", "routed_scaling_factor", "activation_type"]
_WEIGHTS = ["hidden_states", "gemm1_weights", "gemm2_weights"]


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """A function of ``flashinfer.fused_moe``."""

    name: str
    promoted_from: str  # a version
    mended: str  # there
    keywords: tuple[str, ...]  # of every call


@dataclass(frozen=True, slots=True)
class Use:
    """An entry point for a scheme."""

    entry: EntryPoint
    recipe: str  # that prepares the weights
    capabilities: Capabilities
    weight_on_input: bool = False  # whether it can be there, and then only with one expert a token


BF16_ROUTED = EntryPoint(
    "trtllm_bf16_routed_moe", "0.6.18", "an illegal address at few tokens",
    (*_TRTLLM, *_GROUPED, *_WEIGHTS, "use_shuffled_weight", "weight_layout"),
)  # fmt: skip
FP8_TENSOR_ROUTED = EntryPoint(
    "trtllm_fp8_per_tensor_scale_routed_moe", "0.6.18", "weights rounded to bf16 with the ids",
    (*_TRTLLM, *_GROUPED, *_WEIGHTS, "routing_bias", "output1_scales_scalar",
     "output1_scales_gate_scalar", "output2_scales_scalar", "use_routing_scales_on_input"),
)  # fmt: skip
FP8_BLOCK_ROUTED = EntryPoint(
    "trtllm_fp8_block_scale_routed_moe", "0.6.16", "an address past the route map",
    (*_TRTLLM, *_GROUPED, *_WEIGHTS, "routing_bias", "hidden_states_scale",
     "gemm1_weights_scale", "gemm2_weights_scale", "use_shuffled_weight", "weight_layout",
     "fp8_quantization_type"),
)  # fmt: skip
FP4_ROUTED = EntryPoint(
    "trtllm_fp4_block_scale_routed_moe", "0.6.16", "an address past the route map",
    (*_TRTLLM, *_GROUPED, *_WEIGHTS, "routing_bias", "hidden_states_scale", "gemm1_weights_scale",
     "gemm2_weights_scale", "gemm1_bias", "gemm2_bias", "gemm1_alpha", "gemm1_beta",
     "gemm1_clamp_limit", "output1_scale_scalar", "output1_scale_gate_scalar",
     "output2_scale_scalar"),
)  # fmt: skip
CUTLASS = EntryPoint(
    "cutlass_fused_moe", "0.6.15", "no way to ask for a deterministic sum",
    ("input", "token_selected_experts", "token_final_scales", "fc1_expert_weights",
     "fc2_expert_weights", "output_dtype", "quant_scales", "fc1_expert_biases",
     "fc2_expert_biases", "swiglu_alpha", "swiglu_beta", "swiglu_limit", "input_sf", "output",
     "ep_size", "ep_rank", "tp_size", "tp_rank", "use_deepseek_fp8_block_scale",
     "use_mxfp8_act_scaling", "swizzled_input_sf", "use_fused_finalize", "activation_type",
     "tune_max_num_tokens"),
)  # fmt: skip

CUTLASS_W4A16 = replace(
    CUTLASS, promoted_from="0.6.18", mended="the order of the scales",
    keywords=(*CUTLASS.keywords, "use_w4_group_scaling"),
)  # fmt: skip

TAKES_PAIRS = Version("0.6.18")  # from here on FP8 in blocks, too, takes ids and weights apart

# By backend and scheme; "bf16" stands for weights that aren't quantised.
USES = {
    "flashinfer_trtllm": {
        "bf16": Use(BF16_ROUTED, "trtllm_bf16", BLACKWELL),
        "fp8_tensor": Use(FP8_TENSOR_ROUTED, "trtllm_fp8_per_tensor", BLACKWELL, True),
        "fp8_block": Use(FP8_BLOCK_ROUTED, "trtllm_fp8_block", BLACKWELL),
        "mxfp8": Use(FP8_BLOCK_ROUTED, "trtllm_mxfp8", BLACKWELL),
        "mxfp4_a8": Use(FP4_ROUTED, "trtllm_fp4", BLACKWELL),
        "mxfp4_a16": Use(FP4_ROUTED, "trtllm_fp4", ((10, 0),)),  # wrong on 10.3
        "nvfp4": Use(FP4_ROUTED, "trtllm_fp4", BLACKWELL),
    },
    "flashinfer_cutlass": {
        "bf16": Use(CUTLASS, "cutlass_bf16", ((9, 0), *BLACKWELL)),
        "fp8_tensor": Use(CUTLASS, "cutlass_fp8_per_tensor", ((9, 0), *BLACKWELL)),
        "fp8_block": Use(CUTLASS, "cutlass_fp8_block", ((9, 0),)),
        "mxfp4_a8": Use(CUTLASS, "cutlass_mxfp4", BLACKWELL),
        "mxfp4_a16": Use(CUTLASS_W4A16, "cutlass_mxfp4_a16", ((9, 0),)),
        "nvfp4": Use(CUTLASS, "cutlass_nvfp4", BLACKWELL),
    },
}
RULES = trtllm_weights.RULES | cutlass_weights.RULES


def why_not(backend: str, problem: Problem) -> str | None:
    """Why `backend` can't run the problem with the FlashInfer of its machine, in one sentence with
    numbers; None if it can. Pure: nothing is imported, nothing of this machine is looked at."""
    uses, machine = USES[backend], problem.machine
    capabilities = sorted({c for use in uses.values() for c in use.capabilities})
    if machine.capability not in capabilities:
        return f"runs on {among(capabilities, machine.capability)}"
    if machine.flashinfer_version is None:
        return "FlashInfer isn't installed"
    if problem.op != "fused_experts":
        return "runs whole expert layers only"
    scheme = problem.scheme or "bf16"
    use = uses.get(scheme)
    if use is None:
        return f"has no kernels for {scheme}; it has {', '.join(uses)}"
    if machine.capability not in use.capabilities:
        on = among(use.capabilities, machine.capability)
        return f"{use.entry.name} runs {scheme} on {on}"
    return _about_version(use, problem) or _about_layer(use, problem) or _about_call(use, problem)


def among(capabilities: Iterable[tuple[int, int]], got: tuple[int, int] | None) -> str:
    """What is wanted of a device, and what came, as the end of a sentence."""
    wanted = " or ".join("{}.{}".format(*c) for c in capabilities)
    return f"compute capability {wanted}, got {'no GPU' if got is None else '{}.{}'.format(*got)}"


def packs_ids(use: Use, flashinfer_version: str) -> bool:
    """Whether this version takes ids only together with their weights, rounded to bf16."""
    return use.entry is FP8_BLOCK_ROUTED and Version(flashinfer_version) < TAKES_PAIRS


def keywords_of(use: Use, activation: Activation) -> tuple[str, ...]:
    """All that a call passes which the function must take, constants of the activation included."""
    if use.entry.name == CUTLASS.name:
        return use.entry.keywords
    constants = {
        "gemm1_alpha": activation.alpha != 1.0,
        "gemm1_beta": activation.name == "swiglu_oai",
        "gemm1_clamp_limit": activation.limit != math.inf,
    }
    return tuple(dict.fromkeys((*use.entry.keywords, *(n for n in constants if constants[n]))))


def _about_version(use: Use, problem: Problem) -> str | None:
    entry, version = use.entry, known_version(problem.machine.flashinfer_version or "")
    if isinstance(version, str):
        return version
    if version < Version(entry.promoted_from):
        since = f"{entry.promoted_from} mended {entry.mended}"
        return f"needs FlashInfer {entry.promoted_from} for {entry.name}, got {version}: {since}"
    takes = signature(version, entry.name)
    if takes is None:
        return f"FlashInfer {version} has no {entry.name}"
    activation = problem.activation or Activation("swiglu")
    complaint = binds(takes, keywords_of(use, activation))
    if complaint is None and ACTIVATION_TYPES[activation.name] not in enum_members(
        version, "ActivationType"
    ):
        complaint = f"it has no {activation.name}"
    return complaint and f"{entry.name} of FlashInfer {version} can't be called: {complaint}"


def _about_layer(use: Use, problem: Problem) -> str | None:
    rule, activation = RULES[use.recipe], problem.activation or Activation("swiglu")
    if wanted := rule.wanted_activation(activation):
        return f"{use.entry.name} has {wanted}, got {activation.name}"
    if activation.name == "geglu" and use.entry.name != CUTLASS.name:
        return f"{use.entry.name} doesn't say which GELU its GeGLU has: erf's or tanh's"
    if use.entry is FP4_ROUTED and problem.scheme != "nvfp4":  # others are refused, or untested
        if activation.name not in ("swiglu", "swiglu_oai"):
            return f"{use.entry.name} has swiglu or swiglu_oai for MXFP4, got {activation.name}"
    sizes = rule.wanted_size(problem.hidden, problem.intermediate, gated=activation.gated)
    if sizes is not None:
        return f"{use.entry.name} needs a layer {sizes[0]}, got {sizes[1]}"
    if problem.has_bias and not rule.bias:
        return f"{use.entry.name} adds no biases in {problem.scheme or 'bf16'}"
    if problem.num_experts % 4 != 0 or problem.num_experts > MOST_EXPERTS:
        wanted = f"a multiple of 4 experts, up to {MOST_EXPERTS}"
        return f"{use.entry.name} needs {wanted}, got {problem.num_experts}"
    if problem.top_k > MOST_TOP_K:
        return f"{use.entry.name} takes up to {MOST_TOP_K} experts per token, got {problem.top_k}"
    return None


def _about_call(use: Use, problem: Problem) -> str | None:
    got = str(problem.dtype).removeprefix("torch.")
    wanted = [f for f in RULES[use.recipe].formats if f.endswith("float16")] or ["bfloat16"]
    if got not in wanted:
        return f"{use.entry.name} returns {' or '.join(wanted)} in this scheme, x is {got}"
    if problem.scheme in STATIC and not problem.has_static_scales:
        return f"{use.entry.name} takes {problem.scheme} inputs with static scales, none are given"
    if problem.wide:
        return f"{use.entry.name} rounds a rank's partial sum to {got}, and float32 is wanted"
    if problem.has_lora:
        return f"{use.entry.name} takes no low-rank adapters"
    if problem.coded:
        return f"{use.entry.name} is given rows in {got} here, and these are quantised already"
    if problem.needs_grad:
        return f"{use.entry.name} has no backward, and gradients are needed"
    if problem.batch_invariant:
        return f"{use.entry.name} doesn't say that a token's bits don't depend on its batch"
    if problem.weight_on_input and not use.weight_on_input:
        return f"{use.entry.name} applies the routing weight to the output in this scheme"
    if problem.weight_on_input and problem.top_k != 1:
        return f"{use.entry.name} scales inputs for 1 expert per token, got {problem.top_k}"
    if problem.window is not None and use.entry.name == CUTLASS.name:
        first, count = problem.window
        if problem.num_experts % count != 0 or first % count != 0:
            got = f"{count} of {problem.num_experts} from {first}"
            return f"{use.entry.name} divides experts evenly among ranks, got {got}"
    if problem.tokens > MOST_TOKENS:
        return f"{use.entry.name} is right up to {MOST_TOKENS} tokens, got {problem.tokens}"
    return None
