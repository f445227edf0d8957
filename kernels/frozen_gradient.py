"""Gradient through frozen codes: a grouped GEMM along the rows of quantised weights.

    out[r, d] = sum_n a[r, n] · w[e, n, d]  (+ low[r, :] · up[e, d, :])    r in the rows of e

The forward contracts the columns of w, d; this contracts its rows, n, so w is read as it lies and
no transposed or dequantised copy of the weights exists: a step takes BLOCK_N rows apart in
registers. What reaches along all of n, a matrix's scale, is applied to the sums; every other scale
to the numbers that it belongs to, before they are rounded to a's type: bf16 holds a code times an
MX or NVFP4 scale exactly.

`a` is the gradient of the projection's output, in expert order, or in token order and gathered on
the way in. S rows, N rows of w (contracted), D columns of w.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow
from tmoe.kernels.gemm_loop import add_product
from tmoe.kernels.gemm_tile import load_tile, tile_position
from tmoe.kernels.launch import cdiv, fp32_precision, launch, pdl_options
from tmoe.kernels.low_rank import NO_ARGUMENTS, LowRankRows, add_low_rank
from tmoe.kernels.rounding import decode_e2m1, decode_e4m3, decode_ue8m0, unpack
from tmoe.kernels.sort import SortedTokens
from tmoe.kernels.tiles import Tile
from tmoe.kernels.weight_codes import Scales


@triton.jit
def _load_numbers(
    w_ptr, scale_ptr, global_ptr, expert, rows, tile_d, N, D, w_strides, scale_strides,
    global_strides, PACKED: tl.constexpr, SCALE_TYPE: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, HALVES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """fp32 [rows, BLOCK_D] of w; 0 past its edges, whatever the scales there are."""
    PER_BYTE: tl.constexpr = 2 if PACKED else 1
    offs = tile_d * (BLOCK_D // PER_BYTE) + tl.arange(0, BLOCK_D // PER_BYTE)
    expert = expert.to(tl.int64)
    ptrs = w_ptr + expert * w_strides[0] + rows.to(tl.int64)[:, None] * w_strides[1]
    in_rows = rows < N
    mask = in_rows[:, None] & (offs < D // PER_BYTE)[None, :]
    codes = tl.load(ptrs + offs[None, :] * w_strides[2], mask=mask, other=0)
    x = decode_e2m1(unpack(codes)) if PACKED else decode_e4m3(codes)
    if scale_ptr is not None and (SCALE_ROWS > 0 or SCALE_COLUMNS > 0):
        # One scale for GROUP columns; a tile is part of a group or some groups.
        GROUP: tl.constexpr = BLOCK_D if SCALE_COLUMNS == 0 else min(SCALE_COLUMNS, BLOCK_D)
        GROUPS: tl.constexpr = BLOCK_D // GROUP
        s_rows = rows // SCALE_ROWS if SCALE_ROWS > 0 else rows * 0
        first = tile_d * BLOCK_D + tl.arange(0, GROUPS) * GROUP
        s_columns = first // SCALE_COLUMNS if SCALE_COLUMNS > 0 else first * 0
        s_ptrs = scale_ptr + expert * scale_strides[0]
        s_ptrs += s_rows.to(tl.int64)[:, None] * scale_strides[1]
        s_ptrs += s_columns[None, :] * scale_strides[2]
        s_mask = in_rows[:, None] & (first < D)[None, :]
        scale = tl.load(s_ptrs, mask=s_mask, other=0)
        if SCALE_TYPE == "e8m0":
            scale = decode_ue8m0(scale.to(tl.int32))
        elif SCALE_TYPE == "e4m3":
            scale = decode_e4m3(scale)
        x = tl.reshape(x, (x.shape[0], GROUPS, GROUP)) * scale[:, :, None]
        x = tl.reshape(x, (x.shape[0], BLOCK_D))
    if HALVES:
        second = (rows >= tl.cdiv(N, 2)).to(tl.int32)
        of_half = global_ptr + expert * global_strides[0] + second * global_strides[1]
        x *= tl.load(of_half, mask=in_rows, other=0.0)[:, None]
    offs_d = tile_d * BLOCK_D + tl.arange(0, BLOCK_D)
    return tl.where(in_rows[:, None] & (offs_d < D)[None, :], x, 0.0)


@triton.jit(do_not_specialize=["max_tiles", "top_k"])
def _frozen_gradient_kernel(
    out_ptr,  # (S, D)  written
    a_ptr,  # (T, N) if GATHER, else (S, N)
    w_ptr,  # (E, N, D) bytes; packed: D / 2 of them
    scale_ptr,  # (E, …), one for some rows and columns of w
    global_ptr,  # (E, halves) fp32, or None
    low_ptr,  # (S, R)  of an adapter; or None
    up_ptr,  # (E, D, R)  of an adapter; or None
    row_to_slot_ptr,  # (S,)
    tiles_ptr,  # (max_tiles, 3)  expert, first row, end row
    num_tiles_ptr,  # (1,)
    max_tiles, N, D, R, top_k, stride_out, a_strides, w_strides, scale_strides, global_strides,
    stride_low, up_strides,
    GATHER: tl.constexpr, PACKED: tl.constexpr, SCALE_TYPE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, HALVES: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles,)."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    num_tiles, tiles_d = tl.load(num_tiles_ptr), tl.cdiv(D, BLOCK_D)
    tile_m, tile_d = tile_position(tl.program_id(0), max_tiles, tiles_d, GROUP_M)
    if tile_m < num_tiles:
        expert, first_row, end_row = load_tile(tiles_ptr, tile_m)
        rows = first_row + tl.arange(0, BLOCK_M)
        in_expert = rows < end_row
        a_rows = rows
        if GATHER:
            a_rows = tl.load(row_to_slot_ptr + rows, mask=in_expert, other=0) // top_k
        offs_n = tl.arange(0, BLOCK_N)
        a_ptrs = a_ptr + a_rows.to(tl.int64)[:, None] * a_strides[0] + offs_n * a_strides[1]
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for n in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
            in_depth = (offs_n < N - n)[None, :]
            a = tl.load(a_ptrs, mask=in_expert[:, None] & in_depth, other=0.0)
            w = _load_numbers(
                w_ptr, scale_ptr, global_ptr, expert, n + offs_n, tile_d, N, D, w_strides,
                scale_strides, global_strides, PACKED, SCALE_TYPE, SCALE_ROWS, SCALE_COLUMNS,
                HALVES, BLOCK_D,
            )  # fmt: skip
            acc = add_product(acc, a, narrow(w, a.dtype).T, None, PRECISION, False)
            a_ptrs += BLOCK_N * a_strides[1]
        if SCALE_ROWS == 0 and SCALE_COLUMNS == 0:
            acc *= tl.load(scale_ptr + expert.to(tl.int64) * scale_strides[0])
        if global_ptr is not None and not HALVES:
            acc *= tl.load(global_ptr + expert.to(tl.int64) * global_strides[0])
        offs_d = tile_d * BLOCK_D + tl.arange(0, BLOCK_D)
        if low_ptr is not None:
            adapter = (low_ptr, up_ptr, R, stride_low, up_strides)
            columns = tl.where(offs_d < D, offs_d, 0)
            acc = add_low_rank(
                adapter, acc, expert, rows, in_expert, columns, PRECISION, BLOCK_M, BLOCK_R
            )
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + offs_d[None, :]
        mask = in_expert[:, None] & (offs_d < D)[None, :]
        tl.store(out_ptrs, narrow(acc, out_ptr.dtype.element_ty), mask=mask)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def frozen_gradient(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    order: SortedTokens,
    tile: Tile,
    *,
    scales: Scales,
    gather: bool = False,
    adapter: LowRankRows | None = None,
) -> Tensor:
    """Write a @ w[e] for the rows of each expert e to `out` (S, D) and return it.

    a: (S, N) in expert order, or with `gather` (T, N) in token order; bf16 or fp32, as `out`, which
    has unit column stride. w: (E, N, D) float8_e4m3fn, or packed uint8 (E, N, D / 2); `scales` has
    its scales. adapter: its up is (E, D, rank). Of `tile`, block_n counts columns of w and block_d
    the contracted rows. Rows from expert_offsets[E] on are not written.
    """
    D, N = out.shape[1], a.shape[1]
    max_tiles = order.tiles.shape[0]
    programs = max_tiles * cdiv(D, tile.block_n)
    if programs == 0:
        return out
    low, up, rank, stride_low, up_strides = NO_ARGUMENTS if adapter is None else adapter.arguments
    _, weight_scale, weight_global, _, _ = scales.tensors
    if weight_scale is not None and weight_scale.dtype == torch.int16:  # in twos; here one by one
        weight_scale = scales.weight.view(torch.uint8)  # type: ignore[union-attr]
    kinds = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e8m0"}
    kind = kinds.get(scales.weight.dtype, "fp32")  # type: ignore[union-attr]
    strides = _scale_strides(weight_scale, scales)
    halves = weight_global is not None and weight_global.ndim == 2
    launch(
        _frozen_gradient_kernel, (programs,),
        out, a, w.view(torch.uint8), weight_scale, weight_global, low, up,
        order.row_to_slot, order.tiles, order.num_tiles,
        max_tiles, N, D, rank, order.top_k, out.stride(0), a.stride(), w.stride(), strides,
        scales.strides[2], stride_low, up_strides,
        GATHER=gather, PACKED=scales.packed, SCALE_TYPE=kind, SCALE_ROWS=scales.weight_rows,
        SCALE_COLUMNS=scales.weight_columns, HALVES=halves,
        PRECISION=fp32_precision(), NUM_STAGES=tile.num_stages,
        BLOCK_M=tile.block_m, BLOCK_D=tile.block_n, BLOCK_N=tile.block_d,
        BLOCK_R=16 if adapter is None else adapter.block_r, GROUP_M=tile.group_m,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(out.device),
    )  # fmt: skip
    return out


def _scale_strides(scale: Tensor | None, scales: Scales) -> tuple[int, ...]:
    """Of (E, rows, columns), 0 for a dimension that isn't there."""
    found = (*(() if scale is None or scale.numel() == 1 else scale.stride()), 0, 0, 0)[:3]
    if scales.weight_rows == 0 and scales.weight_columns > 0:
        return (found[0], 0, found[1])
    return found


def frozen_gradient_ref(a: Tensor, w: Tensor, expert_offsets: Tensor) -> Tensor:
    """The same in torch, of a (S, N) in expert order and dequantised w; rows of no expert are 0."""
    out = a.new_zeros(a.shape[0], w.shape[2])
    bounds = expert_offsets.tolist()
    for e, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        out[start:end] = a[start:end] @ w[e].to(a.dtype)
    return out
