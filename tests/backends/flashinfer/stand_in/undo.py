"""FlashInfer's layouts undone, by arithmetic that uses nothing of what it tests."""

from __future__ import annotations

import torch
from torch import Tensor

# values that share a scale, and those in a byte of codes
VECTOR = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
PER_BYTE = {"nvfp4": 2, "mxfp4": 2, "mxfp8": 1}


def gate_first(w: Tensor) -> Tensor:
    """[up; gate], as FlashInfer's functions take it -> as tmoe holds it."""
    return torch.cat(w.chunk(2, dim=1)[::-1], dim=1)


def source_rows(rows: int, tile: int) -> list[int]:
    """Where row n of a shuffled matrix was before: number n of a block is column n // 8, line
    n % 8 of 8 lines."""
    block = {64: 16, 128: 32}[tile]
    return [n - n % block + (n % block % 8) * (block // 8) + n % block // 8 for n in range(rows)]


def unshuffled(w: Tensor, tile: int) -> Tensor:
    plain = torch.empty_like(w)
    plain[:, source_rows(w.shape[1], tile)] = w
    return plain


def gate_up_of_fused(w: Tensor) -> Tensor:
    """u0, g0, u1, g1, ... -> [gate; up]."""
    return torch.cat((w[:, 1::2], w[:, 0::2]), dim=1)


def unswizzled(scale: Tensor, codes: Tensor, format: str) -> Tensor:
    """One-byte scales in the 128×4 swizzle -> (E, rows, columns), as many as the codes have."""
    rows, columns = codes.shape[1], codes.shape[2] * PER_BYTE[format] // VECTOR[format]
    m, k = torch.arange(rows)[:, None], torch.arange(columns)[None]
    width = -(-columns // 4) * 4
    at = m // 128 * (width // 4) * 512 + k // 4 * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
    return scale.view(torch.uint8).flatten(1)[:, at]


def unblocked(w: Tensor) -> Tensor:
    """(E, K/block, rows, block) -> (E, rows, K)."""
    return torch.cat(w.unbind(1), dim=-1)


def values_of(codes: Tensor, scale: Tensor | None, format: str) -> Tensor:
    """fp64 code · block scale: what a kernel's dot products are made of."""
    if PER_BYTE.get(format) == 2:
        codes = codes.view(torch.uint8)
        e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
        values = torch.cat((e2m1, -e2m1))[nibbles]
    else:
        values = codes.double()
    if scale is None:
        return values
    if format == "nvfp4":
        scale = scale.view(torch.float8_e4m3fn).double()
    elif format in ("mxfp4", "mxfp8"):
        scale = 2.0 ** (scale.view(torch.uint8).double() - 127)
    else:
        scale = scale.double().repeat_interleave(128, dim=1)
    return values * scale.repeat_interleave(values.shape[-1] // scale.shape[-1], dim=-1)
