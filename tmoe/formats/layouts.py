"""Orders in which codes and scales lie in memory: pure functions, both ways, on any device.

`QuantizedTensor` keeps scales in plain row-major order. Kernels elsewhere want one of these:

* transposed: scales of (T, K/128) activations as [K/128, T] (DeepSeek-style FP8 GEMMs);
* 128×4 swizzle: what Blackwell's tensor cores read. Scales of 128 rows × 4 columns are one tile of
  512 bytes, tiles of a row of tiles follow each other, and inside a tile row m stands beside rows
  m + 32, m + 64 and m + 96. The byte of row m, column k, with `columns` = ceil(K_blocks / 4) · 4:

      (m // 128) · columns · 128 + (k // 4) · 512 + (m % 32) · 16 + (m % 128 // 32) · 4 + k % 4
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import expect, expect_tensor

TILE_ROWS, TILE_COLUMNS = 128, 4


def transpose_scale(scale: Tensor) -> Tensor:
    """(..., M, C) -> (..., C, M), contiguous. It is its own inverse."""
    _expect_matrix(scale, "transpose_scale", "scale")
    return scale.transpose(-1, -2).contiguous()


def swizzle_scale(scale: Tensor) -> Tensor:
    """Row-major (..., M, C) one-byte scales -> the 128×4 swizzle of each matrix.

    Returns:
        (..., ceil(M / 128) · 128, ceil(C / 4) · 4) contiguous, in the dtype of `scale`. The bytes
        that fill up are 0.
    """
    op = "swizzle_scale"
    _expect_matrix(scale, op, "scale")
    _expect_bytes(scale, op, "scale")
    *lead, M, C = scale.shape
    rows, columns = _padded(M, C)
    padded = F.pad(scale.view(torch.uint8), (0, columns - C, 0, rows - M))
    tiles = padded.view(*lead, rows // TILE_ROWS, 4, 32, columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.transpose(-4, -2).reshape(*lead, rows, columns).view(scale.dtype)


def unswizzle_scale(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """Undo `swizzle_scale` for scales of `rows` × `columns`; whatever the padding holds is dropped.

    Args:
        swizzled: (..., ceil(rows / 128) · 128, ceil(columns / 4) · 4), one byte per scale.
    """
    op = "unswizzle_scale"
    _expect_matrix(swizzled, op, "swizzled")
    _expect_bytes(swizzled, op, "swizzled")
    wanted = _padded(rows, columns)
    shape = tuple(swizzled.shape)
    expect(shape[-2:] == wanted, op, "swizzled", f"of shape (..., {wanted[0]}, {wanted[1]})", shape)
    lead = shape[:-2]
    tiles = swizzled.view(torch.uint8).reshape(
        *lead, wanted[0] // TILE_ROWS, wanted[1] // TILE_COLUMNS, 32, 4, TILE_COLUMNS
    )
    plain = tiles.transpose(-4, -2).reshape(*lead, *wanted)[..., :rows, :columns]
    return plain.contiguous().view(swizzled.dtype)


def pack_e2m1(codes: Tensor) -> Tensor:
    """4-bit codes 0..15, uint8 (..., K) -> uint8 (..., K / 2): element 2i is the low nibble of byte
    i, element 2i + 1 its high nibble."""
    op = "pack_e2m1"
    _expect_dtype(codes, op, "codes", torch.uint8)
    ok = codes.ndim >= 1 and codes.shape[-1] % 2 == 0
    expect(ok, op, "codes", "of even row length", tuple(codes.shape))
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Undo `pack_e2m1`: uint8 (..., K / 2) -> codes 0..15, uint8 (..., K)."""
    _expect_dtype(packed, "unpack_e2m1", "packed", torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_e8m0(scale: Tensor) -> Tensor:
    """e8m0 bytes -> fp32: byte b is 2^(b - 127), from 2^-127 (an fp32 subnormal); 255 is NaN."""
    _expect_dtype(scale, "decode_e8m0", "scale", torch.uint8)
    exponent = scale.to(torch.int32)  # fp32 has the same biased exponent, above 23 mantissa bits
    bits = exponent << 23
    bits = bits.masked_fill(exponent == 0, 1 << 22).masked_fill(exponent == 255, 0x7FC00000)
    return bits.view(torch.float32)


def e4m3fn_to_fnuz(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and fp32 scale for hardware whose FP8 is e4m3fnuz (AMD gfx942), with the same values.

    A byte means half as much there, so the scale doubles. Byte 0x80, -0 here, is its only NaN:
    -0 becomes 0, and a NaN becomes 0x80.
    """
    op = "e4m3fn_to_fnuz"
    _expect_dtype(data, op, "data", torch.float8_e4m3fn)
    _expect_dtype(scale, op, "scale", torch.float32)
    codes = data.view(torch.uint8)
    nan = (codes & 0x7F) == 0x7F
    codes = codes.masked_fill(codes == 0x80, 0).masked_fill(nan, 0x80)
    return codes.view(torch.float8_e4m3fnuz), scale * 2


def _padded(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def _expect_matrix(value: Tensor, op: str, arg: str) -> None:
    expect_tensor(value, op, arg)
    expect(value.ndim >= 2, op, arg, "of at least 2 dimensions", tuple(value.shape))


def _expect_bytes(value: Tensor, op: str, arg: str) -> None:
    expect(value.dtype.itemsize == 1, op, arg, "of a one-byte dtype", value.dtype)


def _expect_dtype(value: Tensor, op: str, arg: str, dtype: torch.dtype) -> None:
    expect_tensor(value, op, arg)
    expect(value.dtype == dtype, op, arg, f"of dtype {dtype}", value.dtype)
