"""Which single operations FlashInfer could run, and why not: all from facts.

Offered is what takes our arguments and means the same by them. Whether the results are ours, too,
is for the comparison at the first use to say (`tmoe.dispatch.first_use`). From the sources up to
0.7.4 we expect these to differ, and then Triton stays:

* the router's sigmoid is 0.5 · tanh(x / 2) + 0.5, which is 0 below x = -17; and nvcc 13.0 makes an
  instruction with an error of 2^-11 of that tanh, for -use_fast_math is on, which can change
  experts or their order;
* a quantiser's scale doesn't see a NaN, which becomes the largest code; a block whose scale is
  2^-127 becomes zeros; the MXFP8 one makes +448 of -Inf in 0.7.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from packaging.version import Version

from ...dispatch.problem import Problem
from ...routing import RULES, RoutingMethod
from .signatures import binds, known_version, signature
from .support import BLACKWELL, among


@dataclass(frozen=True, slots=True)
class Function:
    """A function of FlashInfer's, and what every call passes."""

    name: str
    known_from: str  # the version from which it does what it does today
    keywords: tuple[str, ...]


ROUTER = Function(
    "fused_topk_deepseek", "0.6.8.post1",
    ("scores", "bias", "n_group", "topk_group", "topk", "routed_scaling_factor", "topk_values",
     "topk_indices", "launch_with_pdl"),
)  # fmt: skip
QUANTIZERS = {
    # Before, an infinity became NaN.
    "mxfp8": Function(
        "mxfp8_quantize", "0.6.18", ("input", "is_sf_swizzled_layout", "alignment")
    ),
    "mxfp4": Function(
        "fp4_quantize", "0.6.8.post1",
        ("input", "global_scale", "sf_vec_size", "sf_use_ue8m0", "is_sf_swizzled_layout"),
    ),
}  # fmt: skip
_GEMM = ("a", "b", "a_scale", "b_scale", "m_indptr", "mma_sm", "out")
GEMMS = {
    "fp8_block": Function(
        "group_gemm_fp8_nt_groupwise", "0.6.8.post1",
        (*_GEMM, "scale_granularity_mnk", "scale_major_mode"),
    ),
    # Its name was another one before.
    "mxfp4_a8": Function(
        "group_gemm_mxfp8_mxfp4_nt_groupwise", "0.6.15",
        (*_GEMM, "tile_m", "tile_n", "tile_k", "swap_ab"),
    ),
}  # fmt: skip
ELSEWHERE = {
    "nvfp4": "group_gemm_nvfp4_nt_groupwise runs on compute capability 12.0 or 12.1",
}
ROUTED_LIKE_DEEPSEEK = (RULES[RoutingMethod.DeepSeekV3], RULES[RoutingMethod.MiniMax2])


def why_not(problem: Problem) -> str | None:
    """Why FlashInfer can't run the operation by itself, in one sentence with numbers; None if it
    can. Pure: nothing is imported, nothing of this machine is looked at."""
    machine = problem.machine
    if machine.capability not in BLACKWELL:
        return f"runs on {among(BLACKWELL, machine.capability)}"
    if machine.flashinfer_version is None:
        return "FlashInfer isn't installed"
    offered = {"route": _about_route, "quantize": _about_quantize, "grouped_gemm": _about_gemm}
    if problem.op not in offered:
        return f"runs {', '.join(offered)}, not {problem.op}"
    if problem.needs_grad:
        return f"FlashInfer's {problem.op} has no backward, and gradients are needed"
    answer = offered[problem.op](problem)
    if isinstance(answer, str):
        return answer
    return _about_version(answer, machine.flashinfer_version)


def _about_version(function: Function, installed: str) -> str | None:
    version = known_version(installed)
    if isinstance(version, str):
        return version
    if version < Version(function.known_from):
        return f"needs FlashInfer {function.known_from} for {function.name}, got {version}"
    takes = signature(version, function.name)
    if takes is None:
        return f"FlashInfer {version} has no {function.name}"
    complaint = binds(takes, function.keywords)
    return complaint and f"{function.name} of FlashInfer {version} can't be called: {complaint}"


def _about_route(problem: Problem) -> Function | str:
    routing = problem.routing
    assert routing is not None
    E, K, G, kept = routing.num_experts, routing.top_k, routing.n_group, routing.topk_group
    name = ROUTER.name
    if routing.rule not in ROUTED_LIKE_DEEPSEEK:
        return f"{name} routes like DeepSeekV3, not like {routing.name}"
    if problem.extras:
        return f"{name} takes logits and a bias, and knows nothing of {', '.join(problem.extras)}"
    if problem.dtype != torch.float32:
        got = str(problem.dtype).removeprefix("torch.")
        return f"{name} rounds weights to the logits' dtype, which must be float32, got {got}"
    if K > 8:
        return f"{name} takes up to 8 experts per token, got {K}"
    if kept * G < K:
        return f"{name} wants n_group · topk_group to be at least top_k={K}, got {G} · {kept}"
    if G == 1:
        return ROUTER if E <= 384 else f"{name} takes up to 384 experts in one group, got {E}"
    # What follows it doesn't refuse itself: groups past the 8th and kept ones past the 4th are
    # ignored.
    if G > 8 or kept > 4:
        return f"{name} takes up to 8 groups and keeps up to 4, got {G} and {kept}"
    if not 2 <= E // G <= 32:
        return f"{name} takes groups of 2 to 32 experts, got {E // G}"
    return ROUTER


def _about_quantize(problem: Problem) -> Function | str:
    recipe, columns = problem.recipe, problem.hidden
    assert recipe is not None
    format = recipe.format.name
    if format == "nvfp4":
        return (
            "fp4_quantize divides by approximate reciprocals for nvfp4: its codes may be a step "
            "away, and tmoe's are exact"
        )
    function = QUANTIZERS.get(format)
    if function is None:
        return f"has no quantiser for {format}; it has {', '.join(QUANTIZERS)}"
    if recipe.scale_rule != "ceil":
        return f"{function.name} rounds scales by the rule ceil, got {recipe.scale_rule}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        got = str(problem.dtype).removeprefix("torch.")
        return f"{function.name} takes bfloat16 and float16, got {got}"
    if columns % 32 != 0:
        return f"{function.name} takes rows of whole blocks of 32, got {columns}"
    return function


def _about_gemm(problem: Problem) -> Function | str:
    scheme, N, D = problem.scheme, problem.intermediate, problem.hidden
    if scheme in ELSEWHERE:
        return ELSEWHERE[scheme]
    function = GEMMS.get(scheme or "")
    if function is None:
        return f"has no grouped GEMM for {scheme or 'bf16'}; it has {', '.join(GEMMS)}"
    if problem.dtype != torch.bfloat16:
        got = str(problem.dtype).removeprefix("torch.")
        return f"{function.name} is used for bfloat16, got {got}"
    if problem.has_bias:
        return f"{function.name} adds no bias, and one added later would be a second rounding"
    if problem.batch_invariant:
        return f"{function.name} doesn't say that a row's bits don't depend on its batch"
    if D % 128 != 0:
        return f"{function.name} contracts a multiple of 128, got {D}"
    rows = 128 if scheme == "fp8_block" else 8
    if N % rows != 0:
        return f"{function.name} takes a multiple of {rows} rows of weights, got {N}"
    return function
