"""The calls of the trtllm entry points: what they refuse, and what they answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.backends.flashinfer.stand_in import reading, routing, undo
from tests.backends.flashinfer.stand_in.checks import Checks
from tests.backends.flashinfer.stand_in.kernel import GATED, experts_answer
from tests.backends.flashinfer.stand_in.schemes import BF16, E4M3, FP32, SCHEMES, UINT8, Scheme

if TYPE_CHECKING:
    from tests.backends.flashinfer.stand_in.install import Fake

# Arguments that tmoe leaves out, and what is as good as that.
ABSENT = (
    "gemm1_lora_delta", "routing_replay_out", "per_token_scale", "num_fused_shared_experts",
    "valid_hidden_size", "valid_intermediate_size", "routing_metadata",
)  # fmt: skip
CONSTANTS = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
MOST_NVFP4_TOKENS = 305_000


def trtllm(fake: Fake, op: str, args: dict[str, Any]) -> Tensor | list[Tensor]:
    """What the entry point `op` returns for these arguments, defaults included."""
    checks = Checks(op)
    if op == "trtllm_fp8_per_tensor_scale_moe" and "per_tensor_raises" in fake.faults:
        raise TypeError(f"{op}: mismatched number of arguments, expected 25 but got 24")
    if op.startswith("trtllm_bf16") and "bf16_illegal_address" in fake.faults:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    activation = fake.member_name(checks, args, "activation_type", "ActivationType")
    method = fake.member_name(checks, args, "routing_method_type", "RoutingMethodType")
    _check_tokens(checks, args)
    _check_options(fake, checks, args)
    name = _scheme(fake, checks, args)
    scheme = SCHEMES[name]
    _check_device(fake, checks, name)
    H, I = _check_layer(checks, args, scheme, activation)
    _check_experts(checks, args, method)
    x = _inputs(checks, args, scheme, name, H)
    _check_weights(fake, checks, args, scheme, activation, H, I)
    _check_scalars(checks, args, name)
    _check_constants(checks, args, name, activation)
    weights, ids = _routed(fake, checks, args, method)
    kernel = reading.of_trtllm(args, scheme.format, activation, fake.faults)
    kernel = replace(kernel, rounding=scheme.rounding)
    on_input, factor = None, weights
    if args.get("use_routing_scales_on_input"):
        on_input = weights[:, 0].bfloat16().double()
        factor = weights if "llama4_weight_twice" in fake.faults else torch.ones_like(weights)
    if "weight_twice" in fake.faults:
        factor = factor * weights
    answer = experts_answer(kernel, x, factor, ids, args["local_expert_offset"], on_input)
    if not routing.fits_a_tier(args, method):
        got = args["num_experts"], args["top_k"]
        checks.refuse("missing_tier" in fake.faults, "num_experts", "of a compiled size", got)
        answer.fill_(torch.nan)
    output = args.get("output")
    if output is None:
        output = torch.full((len(x), H), torch.nan, dtype=BF16)
    else:
        wide = range(1, H + 1) if scheme.narrower else (H,)
        shape = (len(x), output.shape[-1] if output.shape[-1] in wide else H)
        checks.refuse(output.dtype == BF16, "output", "bfloat16", output, ValueError)
        checks.refuse(tuple(output.shape) == shape, "output", shape, output, ValueError)
        checks.misuse(output.is_contiguous(), "output", "contiguous", output.stride())
    output.copy_(answer[:, : output.shape[1]])
    return [output] if "_fp4_" in op else output


def _check_tokens(checks: Checks, args: dict[str, Any]) -> None:
    x = args["hidden_states"]
    checks.refuse(isinstance(x, Tensor) and x.ndim == 2, "hidden_states", "2-D", x)
    # Ids of no token look as if there were none. Nobody says what no logits do.
    complain = checks.refuse if "topk_ids" in args else checks.misuse
    complain(len(x) > 0, "hidden_states", "of 1 token or more", len(x))


def _check_options(fake: Fake, checks: Checks, args: dict[str, Any]) -> None:
    checks.absent(args, ABSENT, but=(0,))
    checks.absent(args, ("gemm1_bias", "gemm2_bias") if "_fp8_" in checks.op else ())
    checks.misuse(args["do_finalize"] is True, "do_finalize", True, args["do_finalize"])
    checks.number(args, "tune_max_num_tokens", least=1)
    buffer = args.get("workspace_buffer")
    if buffer is not None:
        ok = buffer.dtype in (torch.uint8, torch.int8) and buffer.ndim == 1
        checks.refuse(ok and buffer.is_contiguous(), "workspace_buffer", "bytes", buffer)
    layout, linear = args.get("hidden_states_scale_layout"), fake.enums["SfLayout"]["layout_linear"]
    ok = layout in (None, linear)
    checks.refuse(ok, "hidden_states_scale_layout", "linear", layout, ValueError)


def _scheme(fake: Fake, checks: Checks, args: dict[str, Any]) -> str:
    """A name of `SCHEMES`, from the function and, as the launcher does, from dtypes and sizes."""
    if "per_tensor" in checks.op:
        return "fp8_tensor"
    if "bf16" in checks.op:
        return "bf16"
    x, x_scale = args["hidden_states"], args["hidden_states_scale"]
    if "block" in checks.op and "fp8" in checks.op:
        kind = fake.member_name(checks, args, "fp8_quantization_type", "Fp8QuantizationType")
        known = {"DeepSeekFp8": "fp8_block", "MxFp8": "mxfp8"}
        checks.refuse(
            kind in known, "fp8_quantization_type", " or ".join(known), kind, NotImplementedError
        )
        return known[kind]
    w, scale = args["gemm1_weights"], args["gemm1_weights_scale"]
    vector = 32 if 2 * w.numel() // max(1, scale.numel()) > 16 else 16
    if x.dtype == UINT8:
        checks.refuse(x_scale is not None, "hidden_states_scale", "given for FP4 inputs", x_scale)
        found = 2 * x.numel() // max(1, x_scale.numel())
        checks.refuse(found == 16, "hidden_states_scale", "of 1 scale for 16 values", x_scale)
        checks.refuse(vector == 16, "gemm1_weights_scale", "NVFP4's as the inputs are", scale)
        return "nvfp4"
    checks.refuse(vector == 32, "gemm1_weights_scale", "MXFP4's beside other inputs", scale)
    if x.dtype == BF16:
        checks.misuse(x_scale is None, "hidden_states_scale", "None for bf16 inputs", x_scale)
        return "mxfp4_a16"
    checks.refuse(x.dtype == E4M3, "hidden_states", "bfloat16, float8_e4m3fn or uint8", x)
    checks.misuse(x_scale is not None, "hidden_states_scale", "MXFP8's: one of E4M3", x_scale)
    found = x.numel() // max(1, x_scale.numel())
    checks.refuse(found == 32, "hidden_states_scale", "of 1 scale for 32 values", x_scale)
    return "mxfp4_a8"


def _check_device(fake: Fake, checks: Checks, name: str) -> None:
    if fake.capability is not None:
        ok = fake.capability[0] == 10 and (name != "mxfp4_a16" or fake.capability[1] != 3)
        wanted = "of compute capability 10.x, for MXFP4 beside bf16 not 10.3"
        checks.refuse(ok, "device", wanted, fake.capability)


def _check_layer(
    checks: Checks, args: dict[str, Any], scheme: Scheme, activation: str
) -> tuple[int, int]:
    """H and I."""
    x = args["hidden_states"]
    H = x.shape[1] * (2 if scheme.inputs == UINT8 else 1)
    I = checks.number(args, "intermediate_size", least=1)
    error = NotImplementedError if scheme.format == "fp8_block" else RuntimeError
    checks.refuse(
        activation in scheme.activations, "activation_type", scheme.activations, activation, error
    )
    multiple = scheme.intermediate[0 if activation in GATED else 1]
    checks.refuse(I % multiple == 0, "intermediate_size", f"a multiple of {multiple}", I)
    checks.misuse(H % scheme.hidden == 0, "hidden_states", f"H % {scheme.hidden} == 0", H)
    few = scheme.format != "nvfp4" or len(x) <= MOST_NVFP4_TOKENS
    checks.misuse(few, "hidden_states", f"at most {MOST_NVFP4_TOKENS} tokens", len(x))
    return H, I


def _check_experts(checks: Checks, args: dict[str, Any], method: str) -> None:
    """Numbers of experts, their groups and who uses bias and factor."""
    E = checks.number(args, "num_experts", least=1)
    K = checks.number(args, "top_k", least=1)
    first = checks.number(args, "local_expert_offset", least=0)
    local = checks.number(args, "local_num_experts", least=1)
    checks.refuse(K <= E, "top_k", f"at most num_experts {E}", K)
    checks.refuse(first + local <= E, "local_num_experts", f"up to {E}", (first, local))
    n_group, topk_group = args["n_group"] or 0, args["topk_group"] or 0
    block, given = "fp8_block" in checks.op, "topk_ids" in args
    complain = checks.refuse if block else checks.misuse
    complain(E % 4 == 0, "num_experts", "a multiple of 4", E)
    checks.refuse(not block or E > K, "num_experts", f"more than top_k {K}", E)
    if method != "DeepSeekV3":
        complain(n_group <= 1 and topk_group <= 1, "n_group", "0 or 1", (n_group, topk_group))
    elif block or n_group > 1:
        checks.refuse(n_group >= 1 and topk_group >= 1, "n_group", "1 or more", n_group)
        ok = E % n_group == 0 and topk_group <= min(4, n_group)
        checks.refuse(ok, "topk_group", "up to 4 of equal groups", (n_group, topk_group))
        checks.refuse(K <= (8 if E <= 384 else 22), "top_k", "at most 8, or 22", K)
        inside = topk_group * E // n_group
        checks.refuse(K < inside, "top_k", f"less than the {inside} experts of the groups", K)
    checks.refuse(method != "Unspecified", "routing_method_type", "specified", method)
    complain(method != "Llama4" or K == 1, "top_k", "1 for Llama4", K)
    if "use_routing_scales_on_input" in args:
        flag = bool(args["use_routing_scales_on_input"])
        checks.misuse(
            flag == (method == "Llama4"), "use_routing_scales_on_input",
            "True for Llama4 and only then", flag,
        )  # fmt: skip
    if given or method not in routing.BIASED:
        what = f"None where {'ids are given' if given else f'{method} ignores it'}"
        bias = args.get("routing_bias")
        checks.misuse(bias is None, "routing_bias", what, bias)
        factor = args["routed_scaling_factor"]
        checks.misuse(factor in (None, 1.0), "routed_scaling_factor", what, factor)
    if not given:
        shape = (len(args["hidden_states"]), E)
        checks.tensor(args, "routing_logits", (FP32, BF16), shape, "dtype shape")
        if args["routing_bias"] is not None:
            checks.tensor(args, "routing_bias", (FP32, BF16), (E,), "dtype shape")


def _routed(fake: Fake, checks: Checks, args: dict[str, Any], method: str) -> tuple[Tensor, Tensor]:
    """Weights and ids."""
    if "topk_ids" in args:
        ids, weights = routing.given(checks, args, fake.version)
    else:
        ids, weights = routing.from_logits(args, method, fake.faults)
    return weights, ids


def _inputs(checks: Checks, args: dict[str, Any], scheme: Scheme, name: str, H: int) -> Tensor:
    """(T, H) fp64, without static scales."""
    T = len(args["hidden_states"])
    shape = (T, H // 2 if scheme.inputs == UINT8 else H)
    looks = "shape" if name == "fp8_tensor" else "dtype shape"
    x = checks.tensor(args, "hidden_states", scheme.inputs, shape, looks)
    if name == "fp8_block":
        scale = checks.tensor(args, "hidden_states_scale", FP32, (H // 128, T), "dtype shape")
        return x.double() * scale.double().T.repeat_interleave(128, dim=1)
    if name == "nvfp4":
        scale = checks.tensor(args, "hidden_states_scale", E4M3, (T, H // 16), "dtype")
    elif name in ("mxfp8", "mxfp4_a8"):
        dtypes = UINT8 if name == "mxfp8" else (UINT8, E4M3)
        scale = checks.tensor(args, "hidden_states_scale", dtypes, (T, H // 32), "dtype")
    else:
        return x.double()
    format = "nvfp4" if name == "nvfp4" else "mxfp8"
    return undo.values_of(x[None], scale[None], format)[0]


def _check_weights(
    fake: Fake, checks: Checks, args: dict[str, Any], scheme: Scheme, activation: str,
    H: int, I: int,
) -> None:  # fmt: skip
    E, format = args["local_num_experts"], scheme.format
    rows = (1 + (activation in GATED)) * I
    layout = "MajorK"
    if "weight_layout" in args:
        layout = fake.member_name(checks, args, "weight_layout", "WeightLayout")
        shuffled = args["use_shuffled_weight"]
        layouts = {
            "fp8_block": ("MajorK", "BlockMajorK") if shuffled else ("MajorK",),
            "mxfp8": ("MajorK",),
            "bfloat16": ("BlockMajorK",),
        }[format]
        checks.refuse(layout in layouts, "weight_layout", " or ".join(layouts), layout)
        ok = format == "fp8_block" or shuffled is True
        checks.refuse(ok, "use_shuffled_weight", "True", shuffled)
    packed = 2 if scheme.weights == UINT8 else 1
    for name, (M, K) in (("gemm1", (rows, H)), ("gemm2", (H, I))):
        block = 128 // scheme.weights.itemsize
        shape = (E, K // block, M, block) if layout == "BlockMajorK" else (E, M, K // packed)
        checks.tensor(args, f"{name}_weights", scheme.weights, shape, scheme.checked)
        arg = f"{name}_weights_scale"
        if format == "fp8_block":
            checks.tensor(args, arg, FP32, (E, M // 128, K // 128), "dtype shape")
        elif format in undo.VECTOR:
            dtype = UINT8 if format == "mxfp8" else E4M3
            checks.tensor(args, arg, dtype, (E, M, K // undo.VECTOR[format]), "dtype")
        bias = args.get(f"{name}_bias")
        if bias is not None:
            checks.tensor(args, f"{name}_bias", FP32, (E, M))


def _check_scalars(checks: Checks, args: dict[str, Any], name: str) -> None:
    """What multiplies the products of formats that have more than block scales."""
    spelt = "scales" if name == "fp8_tensor" else "scale"
    for part in ("output1_{}_scalar", "output1_{}_gate_scalar", "output2_{}_scalar"):
        arg = part.format(spelt)
        if name == "fp8_tensor":
            checks.tensor(args, arg, FP32, (args["local_num_experts"],), "dtype shape")
        elif name == "nvfp4":
            checks.refuse(args[arg] is not None, arg, "given for FP4 inputs", None)
            checks.tensor(args, arg, FP32, (args["local_num_experts"],))
        elif arg in args:
            checks.misuse(args[arg] is None, arg, "None beside MXFP4 weights", args[arg])
    if name == "nvfp4" and "nvfp4_4over6" in args:
        given = args["nvfp4_4over6"]
        checks.misuse(given is None, "nvfp4_4over6", "None, or the environment decides", given)


def _check_constants(checks: Checks, args: dict[str, Any], name: str, activation: str) -> None:
    """Alpha, beta and limit: SwiGLU's; the step has only a limit."""
    for arg in CONSTANTS:
        if args.get(arg) is None:
            continue
        allowed = activation == "Swiglu" and name != "fp8_tensor"
        allowed = allowed or (activation == "SwigluStep" and arg == "gemm1_clamp_limit")
        checks.refuse(allowed, arg, f"None for {activation} in {name}", args[arg], ValueError)
        checks.misuse(name != "fp8_block", arg, "left out: the stand-in doesn't know it", arg)
        looks = "" if name in ("nvfp4", "mxfp4_a8", "mxfp4_a16") else "dtype shape contiguous"
        checks.tensor(args, arg, FP32, (args["local_num_experts"],), looks)
