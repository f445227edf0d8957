"""Orders of weights and scales that FlashInfer's MoE kernels read: pure functions, on any device.

Rows are dimension 1, after the experts: w (E, rows, ...) is a weight (E, rows, K), its scales
(E, rows, K / block) or a bias (E, rows). Three things happen to rows:

* gate and up change places: tmoe has [gate; up], every entry point wants [up; gate];
* they alternate, u0, g0, u1, g1, ..., where the activation is fused into the first GEMM;
* they are shuffled, so that a thread finds what it needs side by side when a tile of 64 or 128 rows
  leaves the tensor core. In each block of 16 rows (tile 64) or 32 (tile 128), written as 8 lines of
  2 or 4 rows, the lines become columns:

      row 8 · c + r of a block is its row r · block / 8 + c before

Layouts are those that FlashInfer 0.7.4's `reorder_rows_for_gated_act_gemm`, `shuffle_matrix_a`,
`shuffle_matrix_sf_a` and `convert_to_block_layout` give; ``tools/record_flashinfer_layouts.py``
records what they give, and the tests compare bit for bit. One layout is absent on purpose: the
scales of FlashInfer's SM90 mixed GEMM differ between its versions, so only the installed helper
knows them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import expect, expect_tensor
from ...formats.layouts import TILE_ROWS, swizzle_scale

SHUFFLED_TOGETHER = {64: 16, 128: 32}  # rows of the epilogue's tile -> rows of a block
_LINES = 8  # of a block


def up_gate(w: Tensor) -> Tensor:
    """(E, 2I, ...) rows [gate; up] -> [up; gate], contiguous. It is its own inverse."""
    _expect_halves(w, "up_gate")
    return torch.cat(as_bytes(w).chunk(2, dim=1)[::-1], dim=1).view(w.dtype)


def up_gate_from_interleaved(w: Tensor) -> Tensor:
    """(E, 2I, ...) rows g0, u0, g1, u1, ... as gpt-oss stores them -> [up; gate], contiguous."""
    _expect_halves(w, "up_gate_from_interleaved")
    plain = as_bytes(w)
    return torch.cat((plain[:, 1::2], plain[:, 0::2]), dim=1).view(w.dtype)


def interleave_halves(w: Tensor) -> Tensor:
    """(E, 2I, ...) rows [A; B] -> A0, B0, A1, B1, ..., contiguous."""
    _expect_halves(w, "interleave_halves")
    return torch.stack(as_bytes(w).chunk(2, dim=1), dim=2).flatten(1, 2).view(w.dtype)


def shuffled_row_indices(
    num_rows: int, epilogue_tile: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Which row comes where: int64 (num_rows,), row i of the shuffled matrix is row indices[i].

    The two tiles have different orders; nothing is cached, so none can be taken for the other.

    Raises:
        ValueError: a tile other than 64 or 128, or rows that don't fill blocks of 16 or 32.
    """
    op = "shuffled_row_indices"
    expect(epilogue_tile in SHUFFLED_TOGETHER, op, "epilogue_tile", "64 or 128", epilogue_tile)
    block = SHUFFLED_TOGETHER[epilogue_tile]
    wanted = f"a multiple of {block} for tile {epilogue_tile}"
    expect(num_rows >= 0 and num_rows % block == 0, op, "num_rows", wanted, num_rows)
    rows = torch.arange(num_rows, device=device)
    return rows.view(-1, _LINES, block // _LINES).transpose(1, 2).flatten()


def shuffle_rows(w: Tensor, epilogue_tile: int) -> Tensor:
    """(E, rows, ...) -> the same with each expert's rows in the order of `shuffled_row_indices`."""
    _expect_rows(w, "shuffle_rows")
    indices = shuffled_row_indices(w.shape[1], epilogue_tile, device=w.device)
    return as_bytes(w).index_select(1, indices).view(w.dtype)


def shuffle_scale_rows(scale: Tensor, epilogue_tile: int, vector_size: int) -> Tensor:
    """Scales of shuffled weights: the weights' own order of rows, then the 128×4 swizzle.

    Args:
        scale: (E, rows, K / vector_size), one byte each, rows a multiple of 128.
        vector_size: values that share a scale, 16 or 32. The order is the same for both.

    Returns:
        (E, rows, columns) in scale's dtype, its columns filled up to a multiple of 4 with zeros.
    """
    op = "shuffle_scale_rows"
    _expect_rows(scale, op, "scale")
    expect(scale.ndim == 3, op, "scale", "of shape (E, rows, columns)", tuple(scale.shape))
    expect(vector_size in (16, 32), op, "vector_size", "16 or 32", vector_size)
    wanted = f"of rows that are a multiple of {TILE_ROWS}"
    expect(scale.shape[1] % TILE_ROWS == 0, op, "scale", wanted, tuple(scale.shape))
    return swizzle_scale(shuffle_rows(scale, epilogue_tile))


def block_major(w: Tensor, block_bytes: int = 128) -> Tensor:
    """(..., rows, K) -> (..., K / block, rows, block): blocks of columns, `block_bytes` wide, one
    after the other. For bf16, 128 bytes are 64 columns."""
    op = "block_major"
    expect_tensor(w, op, "w")
    expect(w.ndim >= 2, op, "w", "of at least 2 dimensions", tuple(w.shape))
    row_bytes = w.shape[-1] * w.dtype.itemsize
    wanted = f"of rows that are a multiple of {block_bytes} bytes"
    expect(row_bytes % block_bytes == 0, op, "w", wanted, f"{row_bytes} bytes")
    blocks = w.unflatten(-1, (-1, block_bytes // w.dtype.itemsize))
    return blocks.transpose(-3, -2).contiguous()


def as_bytes(w: Tensor) -> Tensor:
    """One-byte types as bytes: not every device moves float8 in every way."""
    return w.view(torch.uint8) if w.dtype.itemsize == 1 else w


def _expect_rows(w: Tensor, op: str, arg: str = "w") -> None:
    expect_tensor(w, op, arg)
    expect(w.ndim >= 2, op, arg, "of shape (E, rows, ...)", tuple(w.shape))


def _expect_halves(w: Tensor, op: str) -> None:
    _expect_rows(w, op)
    expect(w.shape[1] % 2 == 0, op, "w", "of an even number of rows", tuple(w.shape))
