"""FlashInfer's single operations by hand in torch: what their launchers refuse, what they compute.

Read from the sources of FlashInfer 0.6.8 to 0.7.4. Nothing of tmoe is used. `OPERATIONS` holds one
function for each entry point: (arguments with defaults filled in, names of faults) -> its result.
What the real one would take and get wrong is `Misuse`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

Args = dict[str, Any]

# What every release gets otherwise than tmoe (first release, what), and faults that none has.
OPERATION_FAULTS = {
    "sigmoid_by_tanh": ("0", "0.5 · tanh(x / 2) + 0.5 is 0 for low logits"),
    "nan_is_largest": ("0.6.18", "a quantiser clamps NaN to the largest code"),
    "nan_spares_the_block": ("0", "a maximum ignores NaN, and so does the scale"),
    "tiny_blocks_are_0": ("0", "a block whose scale is 2^-127 gets codes 0"),
    "fast_tanh": (None, "tanh has 11 bits, as compilers make it of -use_fast_math"),
    "ties_to_the_higher": (None, "the higher index wins a tie"),
    "factor_twice": (None, "routed_scaling_factor is applied twice"),
    "half_up": (None, "ties of codes are rounded away from 0"),
    "next_rows_scale": (None, "a row is multiplied with the scales of the next one"),
    "groups_swapped": (None, "the first two groups get each other's weights"),
    "rows_lost": (None, "the last row of every group isn't written"),
    "raises": (None, "every call raises"),
}


class Misuse(BaseException):  # noqa: N818  it ends a test, as pytest.fail does
    """The real function would take this and answer wrongly."""


def refuse(ok: bool, message: str, error: type[Exception] = ValueError) -> None:
    """What the real one raises."""
    if not ok:
        raise error(message)


def misuse(ok: bool, message: str) -> None:
    if not ok:
        raise Misuse(message)


# route --------------------------------------------------------------------------------------------


def fused_topk_deepseek(args: Args, faults: Collection[str]) -> None:
    x, bias, values, ids = (
        args[name] for name in ("scores", "bias", "topk_values", "topk_indices")
    )
    n_group, kept, K = args["n_group"], args["topk_group"], args["topk"]
    T, E = x.shape
    for name in ("scores", "bias", "topk_values", "topk_indices"):
        misuse(args[name].is_contiguous(), f"{name} must be contiguous")  # refused from 0.7.2 on
    refuse(bias.shape == (E,), "bias must be 1D with length == number of experts")
    refuse(values.shape == (T, K) and ids.shape == (T, K), "results must be (tokens, topk)")
    refuse(values.dtype == x.dtype, "topk_values must have the same dtype as scores")
    refuse(ids.dtype == torch.int32, "topk_indices must be int32 dtype")
    refuse(E % n_group == 0, "num_experts should be divisible by n_group")
    refuse(kept * n_group >= K and kept <= n_group, "topk_group * n_group must be >= topk")
    refuse(K <= 8, "topk must be <= 8")
    if n_group > 1:
        refuse(E // n_group <= 32, "num_experts / n_group must be <= 32")
        refuse(E // n_group * kept <= 128, "num_experts / n_group * topk_group must be <= 128")
        misuse(E <= 256 and n_group <= 8 and kept <= 4 and E // n_group >= 2, "groups are lost")
    else:
        refuse(E <= 384, "num_experts must be <= 384")
    misuse(args.get("routing_replay_out") is None, "routing_replay_out isn't known here")
    misuse(args.get("backend", "default") == "default", "cake isn't known here")

    logits = x.double()
    if {"sigmoid_by_tanh", "fast_tanh"} & set(faults):
        half = torch.tanh(0.5 * logits)
        if "fast_tanh" in faults:
            step = torch.frexp(half).exponent.double().sub(11).exp2()
            half = (half / step).round() * step
        score = 0.5 * half.float() + 0.5
    else:
        score = (1 / (1 + torch.exp(-logits))).float()
    choice = (score + bias.float()).tolist()
    for t in range(T):
        # Compared by bits, a NaN is above all numbers.
        key = [float("inf") if c != c else c for c in choice[t]]
        order = _best(key, range(E), faults)
        size = E // n_group
        if n_group > 1:
            groups = [order_in[:2] for order_in in _by_group(order, n_group, size)]
            sums = [sum(_fp32(key[e]) for e in best) for best in groups]
            chosen = _best([_fp32(s) for s in sums], range(n_group), faults)[:kept]
            order = [e for e in order if e // size in chosen]
        taken = torch.tensor(order[:K])
        s = score[t, taken].double()
        w = s * args["routed_scaling_factor"] / (s.float().sum().double() + 1e-20)
        if "factor_twice" in faults:
            w *= args["routed_scaling_factor"]
        values[t], ids[t] = w.to(values.dtype), taken.int()


def _by_group(order: list[int], n_group: int, size: int) -> list[list[int]]:
    return [[e for e in order if e // size == g] for g in range(n_group)]


def _best(key: list[float], among: range, faults: Collection[str]) -> list[int]:
    sign = -1 if "ties_to_the_higher" in faults else 1
    return sorted(among, key=lambda e: (-key[e], sign * e))


def _fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


# quantize -----------------------------------------------------------------------------------------

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def mxfp8_quantize(args: Args, faults: Collection[str]) -> tuple[Tensor, Tensor]:
    misuse(args["alignment"] == 32, "another alignment isn't known here")
    x = _rows(args)
    scale, byte = _ue8m0(x, 448.0, faults)
    scaled = (x.unflatten(1, (-1, 32)) * _inverse(scale, byte, faults)).flatten(1)
    if "nan_is_largest" in faults:
        scaled = scaled.nan_to_num(nan=448.0)
    codes = scaled.clamp(-448, 448).float()
    if "half_up" in faults:
        codes = codes * (1 + 2.0**-20)
    return codes.to(torch.float8_e4m3fn), byte.flatten()


def fp4_quantize(args: Args, faults: Collection[str]) -> tuple[Tensor, Tensor]:
    refuse(args["sf_vec_size"] in (16, 32), "sf_vec_size can only be 16 or 32", NotImplementedError)
    misuse(args["sf_vec_size"] == 32 and args["sf_use_ue8m0"], "nvfp4 isn't known here")
    misuse(args["global_scale"] is None, "a global scale isn't known here")
    misuse(not args["is_sf_8x4_layout"], "the 8x4 layout isn't known here")
    x = _rows(args)
    scale, byte = _ue8m0(x, 6.0, faults)
    scale = scale.nan_to_num(nan=1.0)  # any codes would do
    scaled = (x.unflatten(1, (-1, 32)) * _inverse(scale, byte, faults)).flatten(1)
    magnitude = scaled.abs().nan_to_num(nan=6.0, posinf=6.0).clamp(max=6.0)
    distance = (magnitude[..., None] - E2M1).abs()
    # The even code of two that are as near: odd ones are put a little further away.
    odd = 1e-12 * (torch.arange(8) % 2)
    if "half_up" in faults:
        odd = -1e-12 * torch.arange(8)
    codes = (distance + odd).argmin(-1).to(torch.uint8)
    codes |= x.signbit().to(torch.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4, byte


def _rows(args: Args) -> Tensor:
    x = args["input"]
    refuse(x.dtype in (torch.bfloat16, torch.float16), "only fp16/bf16", NotImplementedError)
    refuse(x.ndim >= 2 and x.is_contiguous(), "input must be contiguous and >=2D")
    refuse(x.shape[-1] % 32 == 0, "K must be divisible by 32", AssertionError)
    misuse(not args["is_sf_swizzled_layout"], "tmoe's scales are linear")
    misuse(args.get("backend", "cuda") == "cuda", "other backends aren't known here")
    return x.double()


def _ue8m0(x: Tensor, largest: float, faults: Collection[str]) -> tuple[Tensor, Tensor]:
    """Scales (M, K / 32, 1), the least power of two that covers the block, and their bytes."""
    blocks = x.abs().unflatten(1, (-1, 32))
    spared = "nan_spares_the_block" in faults
    amax = (blocks.nan_to_num(nan=0.0, posinf=torch.inf) if spared else blocks).amax(-1)
    mantissa, exponent = torch.frexp(amax / largest)
    exponent = exponent - (mantissa == 0.5).int()
    exponent = torch.where(amax.isinf(), 127, exponent.clamp(-127, 127))
    byte = torch.where(amax == 0, 0, exponent + 127)
    byte = torch.where(amax.isnan(), 255, byte).to(torch.uint8)
    scale = torch.where(amax.isnan(), torch.nan, (byte.double() - 127).exp2())
    return scale[..., None], byte


def _inverse(scale: Tensor, byte: Tensor, faults: Collection[str]) -> Tensor:
    inverse = 1 / scale
    if "tiny_blocks_are_0" in faults:
        inverse = torch.where(byte[..., None] == 0, 0.0, inverse)
    return inverse


# grouped_gemm -------------------------------------------------------------------------------------


def group_gemm_fp8_nt_groupwise(args: Args, faults: Collection[str]) -> Tensor:
    a, b, offsets, out = args["a"], args["b"], args["m_indptr"], args["out"]
    (S, D), (E, N, _) = a.shape, b.shape
    refuse(a.dtype == b.dtype == torch.float8_e4m3fn, "a and b must be float8 tensors")
    refuse(args["a_scale"].dtype == args["b_scale"].dtype == torch.float32, "scales: float32")
    _check_gemm(args, D, N, E, multiple=16)
    misuse(D % 128 == 0 and N % 128 == 0, "the last blocks would have no scale")
    misuse(tuple(args["scale_granularity_mnk"]) == (1, 128, 128), "rows have their own scales")
    misuse(args["scale_major_mode"] == "MN", "K-major scales were misread by a neighbour of it")
    misuse(args.get("backend", "trtllm") == "trtllm", "cutile isn't known here")
    misuse(args["a_scale"].shape == (D // 128, S), f"a_scale must be {(D // 128, S)}")
    misuse(args["b_scale"].shape == (E, D // 128, N // 128), "b_scale is of another shape")
    misuse(S % 4 == 0, "a column of scales begins at a multiple of 16 bytes")
    of_rows = args["a_scale"].t().double()
    if "next_rows_scale" in faults:
        of_rows = of_rows.roll(-1, 0)
    rows = a.double() * of_rows.repeat_interleave(128, 1)
    of_b = args["b_scale"].transpose(1, 2).double()
    weights = b.double() * of_b.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return _multiply(rows, weights, offsets, out, faults)


def group_gemm_mxfp8_mxfp4_nt_groupwise(args: Args, faults: Collection[str]) -> Tensor:
    a, b, offsets, out = args["a"], args["b"], args["m_indptr"], args["out"]
    (S, D), (E, N, _) = a.shape, b.shape
    refuse(a.dtype == torch.float8_e4m3fn, "a must be a float8_e4m3fn tensor")
    refuse(b.dtype == torch.uint8 and b.shape[2] * 2 == D, "b must be packed uint8")
    refuse(args["a_scale"].dtype == args["b_scale"].dtype == torch.uint8, "scales: uint8")
    _check_gemm(args, D, N, E, multiple=128)
    tiles = args["tile_m"], args["tile_n"], args["tile_k"]
    refuse(tiles in {(128, n, k) for n in (64, 128, 192, 256) for k in (128, 256)}, "tiles")
    columns = D // 32
    of_b = torch.empty(E, N, columns)
    padded = -(-N // 128) * 128
    misuse(args["b_scale"].numel() == E * padded * columns, "b_scale is padded to 128 rows")
    for e in range(E):
        start = e * padded * columns
        of_b[e] = _unswizzled(args["b_scale"].flatten()[start:], torch.arange(N), columns)
    of_rows = torch.empty(S, columns)
    for e, (first, last) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        start = (first + e * 127) // 128 * 128 * columns
        bytes_of = args["a_scale"].flatten()[start:]
        misuse(bytes_of.numel() >= -(-(last - first) // 128) * 128 * columns, "a_scale is short")
        of_rows[first:last] = _unswizzled(bytes_of, torch.arange(last - first), columns)
    if "next_rows_scale" in faults:
        of_rows = of_rows.roll(-1, 0)
    rows = a.double() * of_rows.double().repeat_interleave(32, 1)
    codes = torch.stack((b & 15, b >> 4), -1).flatten(-2).long()
    signed = torch.cat((E2M1, -E2M1))[codes]
    return _multiply(rows, signed * of_b.double().repeat_interleave(32, 2), offsets, out, faults)


def _unswizzled(data: Tensor, rows: Tensor, columns: int) -> Tensor:
    """The scales of some rows of a matrix whose bytes `data` begins with."""
    m, k = rows[:, None], torch.arange(columns)[None, :]
    place = m // 128 * (columns * 128) + k // 4 * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
    return (data[place].double() - 127).exp2()


def _check_gemm(args: Args, D: int, N: int, E: int, multiple: int) -> None:
    offsets, out = args["m_indptr"], args["out"]
    refuse(offsets.dtype == torch.int32, "m_indptr must be a int32 tensor")
    refuse(offsets.shape == (E + 1,), "b.shape[0] must equal num_groups")
    refuse(args["b"].shape[0] == E, "b has another number of groups")
    refuse(out.dtype in (torch.bfloat16, torch.float16), "out_dtype must be bf16 or fp16")
    refuse(out.shape == (args["a"].shape[0], N), "out has another shape")
    refuse(N % 8 == 0 and D % multiple == 0, f"n % 8 and k % {multiple}")
    refuse(args["mma_sm"] in (1, 2), "mma_sm must be 1 or 2")
    misuse(bool((offsets % 4 == 0).all()), "every element of m_indptr must be a multiple of 4")
    misuse(int(offsets[-1]) <= len(out), "m_indptr points past the end")
    for name in ("a", "b", "a_scale", "b_scale", "m_indptr", "out"):
        misuse(args[name].is_contiguous(), f"{name} must be contiguous")


def _multiply(
    rows: Tensor, weights: Tensor, offsets: Tensor, out: Tensor, faults: Collection[str]
) -> Tensor:
    """Writes what belongs to a group, and nothing else."""
    experts = list(range(len(weights)))
    if "groups_swapped" in faults:
        experts[:2] = [1, 0]
    for e, first, last in zip(experts, offsets.tolist(), offsets.tolist()[1:], strict=False):
        last -= "rows_lost" in faults
        if first < last:
            out[first:last] = (rows[first:last] @ weights[e].T).to(out.dtype)
    return out


OPERATIONS: dict[str, Callable[[Args, Collection[str]], Any]] = {
    function.__name__: function
    for function in (
        fused_topk_deepseek,
        mxfp8_quantize,
        fp4_quantize,
        group_gemm_fp8_nt_groupwise,
        group_gemm_mxfp8_mxfp4_nt_groupwise,
    )
}
