"""The quantisers in plain torch: what the kernels beside this file must give, bit for bit.

    value = code · block scale (· global scale)        in fp32

    fp8     e4m3 codes   s = max|x| / 448             fp32; 1 where that is 0
    mx      e4m3, e2m1   s = 2^e, by `scale_rule`     one byte per 32 elements of a row
    nvfp4   e2m1         s = e4m3(max|x| / (6 g))     one byte per 16; g = max|x| / 2688 of all

and code = round_to_nearest_even(clamp(x / s)), or x / (s · g). -0 keeps its sign. x (..., M, K) is
computed with in fp32; its last block may be partial. These run without Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.kernels.activation_ref import activate_ref

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "swiglu_oai", "swiglu_step")
ELEMENT_MAX = {"e4m3": 448.0, "e2m1": 6.0}
Activation = tuple[str, float, float]  # name, alpha, limit


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of x (M, K) are quantised: row r of the result is

        x[index[r] // top_k] · weight[index[r]]

    or zeros, from row `count` on and where x has no such row. With a sort's row_to_slot as index
    that is the token of row r times its routing weight.
    """

    index: Tensor | None = None  # (rows of the result,) int32; None: r itself
    top_k: int = 1
    weight: Tensor | None = None  # contiguous, any float dtype; None: 1
    count: Tensor | None = None  # one number, int32; None: all


ALL_ROWS = Rows()


def source_ref(x: Tensor, rows: Rows = ALL_ROWS, activation: Activation | None = None) -> Tensor:
    """The rows that are quantised, in fp32: picked, weighted, activated."""
    x = x.float()
    if rows.index is not None:
        token = rows.index.long() // rows.top_k
        inside = (token >= 0) & (token < x.shape[0])
        x = torch.where(inside[:, None], x[token.clamp(0, x.shape[0] - 1)], 0)
        if rows.weight is not None:
            x = x * rows.weight.flatten().float()[rows.index.long() * inside][:, None]
    if rows.count is not None:
        x = torch.where(torch.arange(x.shape[0], device=x.device)[:, None] < rows.count, x, 0)
    if activation is None:
        return x
    name, alpha, limit = activation
    gate, up = x.chunk(2, dim=-1) if name in GATED_ACTIVATIONS else (x, None)
    return activate_ref(gate, up, name=name, alpha=alpha, limit=limit)


def _divide(a: Tensor, number: float) -> Tensor:
    """Correctly rounded on every device: on CUDA `a / number` is a product with a reciprocal."""
    return a / torch.full_like(a, number)


def _tiles(x: Tensor, bm: int, bk: int) -> Tensor:
    """(..., M, K) → (..., M / bm, bm, K / bk, bk), filled up with zeros."""
    M, K = x.shape[-2:]
    x = F.pad(x, (0, -K % bk, 0, -M % bm))
    return x.reshape(*x.shape[:-2], x.shape[-2] // bm, bm, x.shape[-1] // bk, bk)


def _untile(tiles: Tensor, M: int, K: int) -> Tensor:
    *lead, m, bm, k, bk = tiles.shape
    return tiles.reshape(*lead, m * bm, k * bk)[..., :M, :K]


def _block_size(block: str | Sequence[int], M: int, K: int) -> tuple[int, int]:
    if block == "tensor":
        return M, K
    if block == "row":
        return 1, K
    bm, bk = block
    return bm, bk


def fp8_scale_shape(shape: Sequence[int], block: str | Sequence[int]) -> tuple[int, ...]:
    """One per matrix, one per row, or one per block of (..., M, K)."""
    *lead, M, K = shape
    if block == "tensor":
        return tuple(lead)
    if block == "row":
        return (*lead, M)
    return (*lead, -(-M // block[0]), -(-K // block[1]))


def quantize_fp8_ref(
    x: Tensor,
    *,
    block: str | Sequence[int],
    scale: Tensor | None = None,
    power_of_two: bool = False,
    rows: Rows = ALL_ROWS,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor]:
    """See `quantize_fp8`."""
    x = source_ref(x, rows, activation)
    M, K = x.shape[-2:]
    shape = fp8_scale_shape(x.shape, block)
    if x.numel() == 0:
        return x.to(torch.float8_e4m3fn), x.new_ones(shape) if scale is None else scale.float()
    tiles = _tiles(x, *_block_size(block, M, K))
    grid = (*tiles.shape[:-4], tiles.shape[-4], tiles.shape[-2])
    if scale is None:
        amax = tiles.abs().amax((-3, -1))
        scale = _divide(amax, 448.0)
        if power_of_two:
            byte = encode_ue8m0_ref(amax, "e4m3", "ceil")
            scale = torch.where(scale == 0, 0, decode_ue8m0_ref(byte))
        scale = torch.where(scale == 0, 1.0, scale).reshape(shape)
    scale = scale.float().expand(shape) if scale.numel() == 1 else scale.float().reshape(shape)
    divisor = torch.where(scale == 0, 1.0, scale).reshape(grid)[..., :, None, :, None]
    codes = _untile((tiles / divisor).clamp(-448, 448), M, K)
    return codes.to(torch.float8_e4m3fn), scale


def dequantize_fp8_ref(
    data: Tensor, scale: Tensor, *, block: str | Sequence[int], dtype: torch.dtype
) -> Tensor:
    """See `dequantize_fp8`."""
    M, K = data.shape[-2:]
    if data.numel() == 0:
        return data.to(dtype)
    tiles = _tiles(data.float(), *_block_size(block, M, K))
    scale = scale.float().expand(fp8_scale_shape(data.shape, block))
    scale = scale.reshape(*tiles.shape[:-4], tiles.shape[-4], 1, tiles.shape[-2], 1)
    return _untile(tiles * scale, M, K).to(dtype)


def encode_ue8m0_ref(amax: Tensor, element: str, rule: str) -> Tensor:
    """The scale byte of a block with this maximum, uint8.

    floor: the exponent of max|x|, less that of the element's maximum. even: the same after rounding
    max|x| to one bit behind the point. ceil: the least scale under which nothing saturates.
    """
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa · 2^exponent, mantissa in [.5, 1)
    if rule == "even":
        exponent = exponent + (mantissa >= 0.875)
    elif rule == "ceil":
        exponent = exponent + (mantissa > math.frexp(ELEMENT_MAX[element])[0])
    byte = 127 + exponent - math.frexp(ELEMENT_MAX[element])[1]
    byte = torch.where(amax == 0, 0, byte).clamp(0, 254)
    byte = torch.where(amax == math.inf, 254, byte)
    return torch.where(amax.isnan(), 255, byte).to(torch.uint8)


def decode_ue8m0_ref(byte: Tensor) -> Tensor:
    """2^(byte - 127) in fp32; NaN for 255."""
    return byte.view(torch.float8_e8m0fnu).float()


def encode_e2m1_ref(magnitude: Tensor, x: Tensor) -> Tensor:
    """4-bit codes of `magnitude` with the signs of x: nearest, and the even code in a tie."""
    a = magnitude
    code = (a > 0.25).byte() + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5)
    code = code + (a >= 3.5) + (a > 5)
    return code | x.signbit().byte() << 3


def decode_e2m1_ref(data: Tensor) -> Tensor:
    """Packed codes (..., K / 2) → (..., K) fp32; the low half of a byte comes first."""
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
    values = data.new_tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6), dtype=torch.float32)
    return torch.cat((values, -values))[codes.long()]


def pack_ref(codes: Tensor) -> Tensor:
    """4-bit codes (..., K) → bytes (..., K / 2); the first code is the low half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def quantize_mx_ref(
    x: Tensor,
    *,
    element: str,
    scale_rule: str,
    rows: Rows = ALL_ROWS,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor]:
    """See `quantize_mx`."""
    x = source_ref(x, rows, activation)
    M, K = x.shape[-2:]
    tiles = _tiles(x, 1, 32)  # (..., M, 1, K / 32, 32)
    amax = tiles.abs().amax((-3, -1))
    byte = encode_ue8m0_ref(amax, element, scale_rule)
    scale = decode_ue8m0_ref(byte)[..., :, None, :, None]
    if element == "e4m3":
        codes = _untile((tiles / scale).clamp(-448, 448), M, K)
        return codes.to(torch.float8_e4m3fn), byte
    magnitude = (tiles.abs() / scale.nan_to_num(1.0)).nan_to_num(6.0).clamp(max=6.0)
    return pack_ref(_untile(encode_e2m1_ref(magnitude, tiles), M, K)), byte


def dequantize_mx_ref(data: Tensor, scale: Tensor, *, element: str, dtype: torch.dtype) -> Tensor:
    """See `dequantize_mx`."""
    values = data.float() if element == "e4m3" else decode_e2m1_ref(data)
    blocks = _tiles(values, 1, 32) * decode_ue8m0_ref(scale)[..., :, None, :, None]
    return _untile(blocks, *values.shape[-2:]).to(dtype)


def row_global_scale_ref(
    global_scale: Tensor, shape: Sequence[int], expert_offsets: Tensor | None = None
) -> Tensor:
    """The global scale of every row of (..., M, K): (..., M), or (..., 1) where all share one."""
    *lead, M, _K = shape
    g = global_scale.float()
    if expert_offsets is not None:
        rows = torch.arange(M, device=g.device)
        expert = torch.searchsorted(expert_offsets[1:-1].long().contiguous(), rows, right=True)
        return g.expand(expert_offsets.numel() - 1)[expert]
    if tuple(g.shape) == (*lead, 2):
        second = torch.arange(M, device=g.device) >= M // 2
        return torch.where(second, g[..., 1:], g[..., :1])
    return g.expand(tuple(lead))[..., None]


def quantize_nvfp4_ref(
    x: Tensor,
    *,
    global_scale: Tensor | None = None,
    expert_offsets: Tensor | None = None,
    rows: Rows = ALL_ROWS,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `quantize_nvfp4`."""
    x = source_ref(x, rows, activation)
    M, K = x.shape[-2:]
    if global_scale is None:
        amax = x.abs().amax((-2, -1)) if x.numel() else x.new_zeros(x.shape[:-2])
        global_scale = _divide(amax, 2688.0)
        global_scale = torch.where(global_scale == 0, 1.0, global_scale)
    tiles = _tiles(x, 1, 16)
    g = row_global_scale_ref(global_scale, x.shape, expert_offsets)[..., None]
    amax = tiles.abs().amax((-3, -1))
    divisor = 6.0 * g
    s = amax / torch.where(divisor == 0, 1.0, divisor)
    s = s.clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    d = s.float() * g
    d = torch.where(d > 0, d, 1.0)[..., :, None, :, None]
    magnitude = (tiles.abs() / d).nan_to_num(6.0).clamp(max=6.0)
    codes = encode_e2m1_ref(magnitude, tiles)
    scale = torch.where(amax == 0, 0, s.view(torch.uint8)).view(torch.float8_e4m3fn)
    return pack_ref(_untile(codes, M, K)), scale, global_scale


def dequantize_nvfp4_ref(
    data: Tensor, scale: Tensor, global_scale: Tensor | None, *,
    expert_offsets: Tensor | None = None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `dequantize_nvfp4`."""
    values, scale = decode_e2m1_ref(data), scale.float()
    if global_scale is not None:
        scale = scale * row_global_scale_ref(global_scale, values.shape, expert_offsets)[..., None]
    blocks = _tiles(values, 1, 16) * scale[..., :, None, :, None]
    return _untile(blocks, *values.shape[-2:]).to(dtype)
