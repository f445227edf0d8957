"""The calls of `cutlass_fused_moe`: what it refuses, and what it answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.backends.flashinfer.stand_in import reading, rounding, undo
from tests.backends.flashinfer.stand_in.checks import Checks
from tests.backends.flashinfer.stand_in.kernel import GATED, UNGATED, Kernel, experts_answer
from tests.backends.flashinfer.stand_in.rounding import Rounding, exact

if TYPE_CHECKING:
    from tests.backends.flashinfer.stand_in.install import Fake

OP = "cutlass_fused_moe"
E4M3, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
ABSENT = (
    "use_w4_group_scaling", "use_packed_weights", "use_wfp4afp8_humming", "profile_ids",
    "clamped_relu2_limit", "situ_beta", "situ_linear_beta",
)  # fmt: skip
# By format: H is a multiple of; what loses precision beside the casts to the output's dtype.
MULTIPLES = {"float": 8, "fp8_tensor": 16, "fp8_block": 128, "nvfp4": 64, "mxfp4": 128}
HIDDEN = {"fp8_tensor": rounding.fp8, "nvfp4": rounding.nvfp4, "mxfp4": rounding.mxfp8}
HIDDEN |= {"fp8_block": rounding.fp8_of_128}
INPUT = {"nvfp4": rounding.nvfp4, "fp8_block": rounding.fp8_of_128}
INPUTS = {"nvfp4": "nvfp4", "mxfp4": "mxfp8"}  # of inputs that are quantised already
FORMATS = {  # by the dtypes of input and weights
    (BF16, BF16): "float", (FP16, FP16): "float", (E4M3, E4M3): "fp8_tensor",
    (BF16, E4M3): "fp8_block", (E4M3, torch.int64): "mxfp4", (BF16, torch.int64): "nvfp4",
    (FP16, torch.int64): "nvfp4", (torch.uint8, torch.int64): "nvfp4",
}  # fmt: skip
FLAGS = {"use_deepseek_fp8_block_scale": "fp8_block", "use_mxfp8_act_scaling": "mxfp4"}
CONSTANTS = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
SMALLEST_BLOCK_SCALE = 1e-10


def cutlass(fake: Fake, args: dict[str, Any]) -> list[Tensor]:
    """What the entry point returns for these arguments, defaults included."""
    checks = Checks(OP)
    activation = fake.member_name(checks, args, "activation_type", "ActivationType")
    known = (*GATED, *UNGATED)
    checks.refuse(activation in known, "activation_type", " or ".join(known), activation)
    _check_options(checks, args)
    format = _format(fake, checks, args)
    E, H, I = _check_weights(checks, args, format, activation)
    ids, weights = _check_slots(checks, args)
    _check_scales(checks, args, format, activation, E, H, I)
    if format == "unscaled":
        args = args | {"quant_scales": None}
    kernel = reading.of_cutlass(args, format, activation, fake.faults)
    dtype = rounding.to(args["output_dtype"])
    hidden = HIDDEN.get(format, dtype)
    kernel = replace(kernel, rounding=Rounding(INPUT.get(format, exact), dtype, hidden, dtype))
    kernel, x = _input(checks, args, kernel, format, H)
    if args["tp_rank"] != 0:
        kernel = replace(kernel, biases=(kernel.biases[0], None))
    if "weight_twice" in fake.faults:
        weights = weights * weights
    first = E * args["ep_rank"]
    answer = experts_answer(kernel, x, weights, ids, first)
    if format == "fp8_block" and "near_zero_scales_nan" in fake.faults:
        if any(bool((s < SMALLEST_BLOCK_SCALE).any()) for s in args["quant_scales"]):
            answer.fill_(torch.nan)
    if args["enable_alltoall"] and args["ep_size"] > 1 and "output_rows_unwritten" in fake.faults:
        answer[~((ids >= first) & (ids < first + E)).any(1)] = torch.nan
    output = args["output"]
    if output is None:
        output = torch.full((len(x), H), torch.nan, dtype=args["output_dtype"])
    ok = output.dtype == args["output_dtype"] and tuple(output.shape) == (len(x), H)
    checks.refuse(ok, "output", f"{args['output_dtype']} {(len(x), H)}", output, ValueError)
    checks.misuse(output.is_contiguous(), "output", "contiguous", output.stride())
    return [output.copy_(answer)]


def _check_options(checks: Checks, args: dict[str, Any]) -> None:
    checks.absent(args, ABSENT)
    quick = args["min_latency_mode"]
    checks.refuse(not quick, "min_latency_mode", False, quick, NotImplementedError)
    cluster = (args["cluster_size"], args["cluster_rank"])
    checks.refuse(cluster == (1, 0), "cluster_size", 1, cluster)
    checks.number(args, "tune_max_num_tokens", least=1)
    for kind in ("tp", "ep"):
        size = checks.number(args, f"{kind}_size", least=1)
        rank = checks.number(args, f"{kind}_rank", least=0)
        checks.misuse(rank < size, f"{kind}_rank", f"less than {kind}_size {size}", rank)
    backend = args.get("backend", "cutlass")
    checks.refuse(backend == "cutlass", "backend", "cutlass", backend, ValueError)
    ok = args["output_dtype"] in (BF16, FP16)
    checks.refuse(ok, "output_dtype", "bfloat16 or float16", args["output_dtype"])


def _format(fake: Fake, checks: Checks, args: dict[str, Any]) -> str:
    """Of the weights, in the words of `undo`, from dtypes and flags as the binding finds it."""
    x, w = args["input"], args["fc1_expert_weights"]
    found = FORMATS.get((x.dtype, w.dtype))
    checks.refuse(found is not None, "input", f"of a dtype that goes with {w.dtype}", x)
    for flag, format in FLAGS.items():
        wanted = found == format
        if bool(args[flag]) != wanted:
            ignored = format == found == "fp8_block" and "scales_ignored" in fake.faults
            checks.misuse(ignored, flag, f"{wanted} for {x.dtype} and {w.dtype}", args[flag])
            found = "unscaled"
    capability = fake.capability
    if capability is not None:
        ok = found != "fp8_block" or capability == (9, 0)
        checks.refuse(ok, "device", "9.0 for FP8 blocks", capability, NotImplementedError)
        ok = found not in ("nvfp4", "mxfp4") or capability >= (10, 0)
        checks.refuse(ok, "device", "10.0 or newer for FP4", capability)
    return str(found)


def _check_weights(
    checks: Checks, args: dict[str, Any], format: str, activation: str
) -> tuple[int, int, int]:
    """E, H and I."""
    w1, w2 = args["fc1_expert_weights"], args["fc2_expert_weights"]
    for name, w in (("fc1_expert_weights", w1), ("fc2_expert_weights", w2)):
        checks.refuse(w.ndim == 3 and w.dtype == w1.dtype, name, f"3-D {w1.dtype}", w)
    packed = 16 if w1.dtype == torch.int64 else 1
    E, H, I = len(w2), w2.shape[1], w2.shape[2] * packed
    rows = (1 + (activation in GATED)) * I
    checks.refuse(tuple(w1.shape[:2]) == (E, rows), "fc1_expert_weights", (E, rows), w1)
    checks.tensor(args, "fc1_expert_weights", w1.dtype, (E, rows, H // packed))
    checks.tensor(args, "fc2_expert_weights", w1.dtype, (E, H, I // packed))
    multiple = MULTIPLES.get(format, 16)
    complain = checks.misuse if format in ("fp8_block", "nvfp4") else checks.refuse
    complain(H % multiple == 0, "fc2_expert_weights", f"H % {multiple} == 0", H)
    complain(I % multiple == 0, "fc2_expert_weights", f"I % {multiple} == 0", I)
    names = ("fc1_expert_biases", "fc2_expert_biases")
    if any(args[name] is not None for name in names):
        for name, size in zip(names, (rows, H), strict=True):
            checks.refuse(args[name] is not None, name, "given beside the other", None)
            checks.tensor(args, name, args["output_dtype"], (E, size), "dtype shape")
    takes = {"Swiglu": CONSTANTS, "SwigluBias": CONSTANTS, "SwigluStep": CONSTANTS[2:]}
    for name in CONSTANTS:
        if args[name] is not None:
            ok = name in takes.get(activation, ())
            checks.misuse(ok, name, f"None: {activation} ignores it", args[name])
            checks.tensor(args, name, FP32, (E,), "dtype shape contiguous")
    if format == "fp8_block":
        checks.misuse(activation == "Swiglu", "activation_type", "Swiglu for blocks", activation)
        checks.absent(args, (*names, *CONSTANTS))
    return E, H, I


def _check_slots(checks: Checks, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Ids (T, K) int64 and weights (T, K) fp64."""
    ids, T = args["token_selected_experts"], len(args["input"])
    checks.refuse(ids.ndim == 2, "token_selected_experts", "2-D", ids)
    shape = (T, ids.shape[1])
    checks.tensor(args, "token_selected_experts", torch.int32, shape, "dtype shape")
    if args["token_final_scales"] is None:
        return ids.long(), torch.ones(shape, dtype=torch.float64)
    weights = checks.tensor(args, "token_final_scales", FP32, shape, "dtype shape")
    return ids.long(), weights.double()


def _check_scales(
    checks: Checks, args: dict[str, Any], format: str, activation: str, E: int, H: int, I: int
) -> None:
    scales = list(args["quant_scales"] or [])
    each, one = [(E,)], [(), (E,)]
    gated = 1 + (activation in GATED)
    if format in ("float", "unscaled"):
        wanted = []
        if format == "float":
            checks.misuse(not scales, "quant_scales", "None or []", scales)
            same = args["output_dtype"] == args["input"].dtype
            checks.misuse(same, "output_dtype", "the input's", args["output_dtype"])
    elif format == "fp8_tensor":
        wanted = [each, one, each, [()]]
    elif format == "fp8_block":
        wanted = [[(E, gated * I // 128, H // 128)], [(E, H // 128, I // 128)]]
    else:
        to = MULTIPLES[format]  # one int32 holds 4 scales: of so many values
        first, second = (
            (E, gated * _up(I, to), _up(H, to) // to),
            (E, _up(H, 128), _up(I, to) // to),
        )
        wanted = [one, [first], each, one, [second], each]
        wanted = wanted if format == "nvfp4" else [[first], each, [second], each]
    if format != "unscaled":
        checks.refuse(len(scales) == len(wanted), "quant_scales", f"{len(wanted)} of them", scales)
    really = "" if format == "fp8_block" else "dtype shape"
    for n, shapes in enumerate(wanted):
        arg = f"quant_scales[{n}]"
        dtype = torch.int32 if format in ("nvfp4", "mxfp4") and len(shapes[0]) == 3 else FP32
        shape = shapes[-1] if tuple(scales[n].shape) == shapes[-1] else shapes[0]
        checks.tensor({arg: scales[n]}, arg, dtype, shape, really)
    if format == "nvfp4" and "nvfp4_4over6" in args:
        given = args["nvfp4_4over6"]
        checks.misuse(given is None, "nvfp4_4over6", "None, or the environment decides", given)


def _input(
    checks: Checks, args: dict[str, Any], kernel: Kernel, format: str, H: int
) -> tuple[Kernel, Tensor]:
    """x (T, H) fp64, and the kernel that takes it: it doesn't quantise what is quantised."""
    x, scale = args["input"], args["input_sf"]
    packed = 2 if x.dtype == torch.uint8 else 1
    checks.tensor(args, "input", x.dtype, (len(x), H // packed))
    if format == "mxfp4":
        checks.refuse(scale is not None, "input_sf", "given for MXFP8 inputs", None)
    elif x.dtype != torch.uint8:
        complain = checks.misuse if format == "nvfp4" else checks.refuse
        complain(scale is None, "input_sf", f"None for {x.dtype} inputs", scale)
        return kernel, x.double()
    checks.misuse(scale is not None, "input_sf", "given for FP4 inputs", None)
    vector, dtypes = (16, (torch.uint8, E4M3)) if format == "nvfp4" else (32, torch.uint8)
    shape = (len(x), H // vector)
    if args["swizzled_input_sf"]:
        shape = (_up(len(x), 128), _up(H // vector, 4))
        flat = scale.shape == (shape[0] * shape[1],)
        checks.tensor(args, "input_sf", dtypes, scale.shape if flat else shape)
        scale = undo.unswizzled(scale.reshape(1, *shape), x[None], INPUTS[format])
    else:
        scale = checks.tensor(args, "input_sf", dtypes, shape)[None]
    x = undo.values_of(x[None], scale, INPUTS[format])[0]
    rounding = replace(kernel.rounding, input=exact)
    return replace(kernel, input=None, rounding=rounding), x


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
