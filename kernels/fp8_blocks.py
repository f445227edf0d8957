"""FP8 blocks on Hopper: the grouped GEMM by specialised warps.

    y[r, n] = act(sum_b s_a[r, b] · s_w[n / 128, b] · (a[r, b] · w[e, n, b]) + bias[e, n])

What `grouped_gemm` computes of e4m3 codes with scales for 128 of the depth (b), here for many rows
in expert order. There a program's tile can't be large, since every step's product has registers of
its own beside the total, and with small tiles the L2 cache is what limits. Here the warps of a
program share a tile of 128 or 192 rows × 128 weight rows, and have different jobs:

    loader       one warp. Asks the TMA for the next step's codes as soon as a slot of the ring in
                 shared memory is empty.
    multipliers  two or three groups of four warps, 64 rows each. They wait until a slot is full,
                 multiply, free the slot, and add the product times its scales in fp32. They drift
                 apart, so that while one adds, another keeps the tensor cores busy.

Triton compiles all warps to one program; this is Gluon, its lower level, where layouts of registers
and barriers are explicit. It isn't interpreted: the tests compare it with `grouped_gemm` on a GPU.
S rows, E experts, N output columns, D depth (contracted).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tmoe.kernels.activation import activate, activate_gated
from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.gemm_tile import load_tile, tile_position, weight_rows
from tmoe.kernels.launch import cdiv, num_multiprocessors
from tmoe.kernels.sort import SortedTokens
from tmoe.kernels.tiles import Tile
from tmoe.kernels.weight_codes import Scales

STEP = gl.constexpr(128)  # of the depth, which has one scale
PART = gl.constexpr(64)  # rows of a multiplier, and of a box that the TMA copies
W_ROWS = gl.constexpr(128)  # that a tile multiplies by
PART_BYTES = gl.constexpr(64 * 128)
LOADER_REGISTERS = 24
MULTIPLIER_REGISTERS = {2: 240, 3: 160}


@dataclass(frozen=True, slots=True)
class Form:
    """What the kernel is compiled for."""

    activation: str
    gated: bool
    interleaved: bool
    group_m: int
    parts: int  # multipliers
    stages: int  # slots of the ring

    @property
    def in_halves(self) -> bool:
        """Whether half of a tile's weight rows are gate rows, and half their up rows."""
        return self.gated and not self.interleaved

    @property
    def w_rows_per_column(self) -> int:
        return 2 if self.gated else 1


barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7


@gluon.jit
def _next(stage, phase, FORM: gl.constexpr):
    """The ring's next slot; barriers change their phase from round to round."""
    wraps = stage + 1 == FORM.stages
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _w_rows(tile_n, N, FORM: gl.constexpr):
    """Where both halves of a tile's weight rows start, within an expert."""
    if FORM.in_halves:
        return tile_n * PART, N + tile_n * PART
    else:
        return tile_n * W_ROWS, tile_n * W_ROWS + PART


@gluon.jit
def _loader(operands, tiles, rings, FORM: gl.constexpr):
    a_desc, w_desc = operands
    tiles_ptr, num_tiles_ptr, N, D = tiles
    a_ring, w_ring, full, empty = rings
    PARTS: gl.constexpr = FORM.parts
    num_tiles = gl.load(num_tiles_ptr)
    N_W = N * FORM.w_rows_per_column
    tiles_n = gl.cdiv(N_W, W_ROWS)
    stage, phase = 0, 1
    for index in range(gl.program_id(0), num_tiles * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_position(index, num_tiles, tiles_n, FORM.group_m)
        expert, first_row, end_row = load_tile(tiles_ptr, tile_m)
        first_w, second_w = _w_rows(tile_n, N, FORM)
        for d in range(0, D, STEP):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            for i in gl.static_range(PARTS):  # parts without rows aren't loaded
                is_last = (first_row + i * PART < end_row) & (first_row + (i + 1) * PART >= end_row)
                mbarrier.expect(bar, (i + 3) * PART_BYTES, pred=is_last)
            w_row = expert * N_W
            tma.async_copy_global_to_shared(
                w_desc, [w_row + first_w, d], bar, w_ring.index(stage * 2)
            )
            tma.async_copy_global_to_shared(
                w_desc, [w_row + second_w, d], bar, w_ring.index(stage * 2 + 1)
            )
            for i in gl.static_range(PARTS):
                row = first_row + i * PART
                tma.async_copy_global_to_shared(
                    a_desc, [row, d], bar, a_ring.index(stage * PARTS + i), pred=row < end_row
                )
            stage, phase = _next(stage, phase, FORM)


@gluon.jit
def _multiplier(
    scales, result, tiles, rings, out_buffers, FORM: gl.constexpr, NUMBER: gl.constexpr
):
    """Rows NUMBER · 64 … of every tile."""
    ACTIVATION: gl.constexpr = FORM.activation
    a_scale_ptr, w_scale_ptr, a_scale_strides, w_scale_strides, num_rows = scales
    out_ptr, bias_ptr, row_weight_ptr, row_to_slot_ptr = result[0]
    stride_out, bias_strides, alpha, limit = result[1]
    tiles_ptr, num_tiles_ptr, N, D = tiles
    a_ring, w_ring, full, empty = rings
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W_ROWS, 32]
    )
    COLUMNS: gl.constexpr = W_ROWS // FORM.w_rows_per_column
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    num_tiles = gl.load(num_tiles_ptr)
    N_W = N * FORM.w_rows_per_column
    tiles_n = gl.cdiv(N_W, W_ROWS)
    num_steps = gl.cdiv(D, STEP)
    w_tiles = w_ring._reinterpret(w_ring.dtype, [FORM.stages, W_ROWS, STEP], w_ring.layout)
    zero = gl.zeros((PART, W_ROWS), gl.float32, layout=PRODUCT)
    part_rows = gl.arange(0, PART, layout=gl.SliceLayout(1, PRODUCT))
    part_columns = gl.arange(0, W_ROWS, layout=gl.SliceLayout(0, PRODUCT))
    out_buffer = out_buffers.index(NUMBER)
    stage, phase = 0, 0
    for index in range(gl.program_id(0), num_tiles * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_position(index, num_tiles, tiles_n, FORM.group_m)
        expert, first_row, end_row = load_tile(tiles_ptr, tile_m)
        first_row += NUMBER * PART
        has_rows = first_row < end_row
        rows = first_row + part_rows
        acc = zero
        if has_rows:
            first_w, second_w = _w_rows(tile_n, N, FORM)
            first_ptr = w_scale_ptr + expert.to(gl.int64) * w_scale_strides[0]
            second_ptr = first_ptr + second_w // STEP * w_scale_strides[1]
            first_ptr += first_w // STEP * w_scale_strides[1]
            a_ptrs = gl.minimum(rows, num_rows - 1).to(gl.int64) * a_scale_strides[0] + a_scale_ptr
            of_a, first, second = gl.load(a_ptrs), gl.load(first_ptr), gl.load(second_ptr)
            for step in range(num_steps):
                # The next step's scales are loaded here: there is time while this one multiplies.
                if FORM.in_halves:
                    factor = of_a[:, None] * gl.where(part_columns < PART, first, second)[None, :]
                else:
                    factor = (of_a * first)[:, None]
                ahead = gl.minimum(step + 1, num_steps - 1)
                of_a = gl.load(a_ptrs + ahead.to(gl.int64) * a_scale_strides[1])
                first = gl.load(first_ptr + ahead * w_scale_strides[2])
                second = gl.load(second_ptr + ahead * w_scale_strides[2])
                mbarrier.wait(full.index(stage), phase)
                product = warpgroup_mma(
                    a_ring.index(stage * FORM.parts + NUMBER),
                    w_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True,
                )  # fmt: skip
                product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
                mbarrier.arrive(empty.index(stage), count=1)
                acc = gl.fma(product, factor, acc)
                stage, phase = _next(stage, phase, FORM)

            if bias_ptr is not None:
                of_bias = weight_rows(
                    tile_n, part_columns, N, FORM.gated, FORM.interleaved, COLUMNS
                )
                ptrs = bias_ptr + expert.to(gl.int64) * bias_strides[0] + of_bias * bias_strides[1]
                acc += widen(gl.load(ptrs)).to(gl.float32)[None, :]
            if FORM.gated:
                if FORM.interleaved:
                    gate, up = acc.reshape((PART, COLUMNS, 2)).split()
                else:
                    gate, up = acc.reshape((PART, 2, COLUMNS)).permute((0, 2, 1)).split()
                y = activate_gated(gate, up, alpha, limit, ACTIVATION)
            else:
                y = activate(acc, ACTIVATION)
                if row_weight_ptr is not None:
                    in_expert = rows < end_row
                    slots = gl.load(row_to_slot_ptr + rows, mask=in_expert, other=0)
                    weight = gl.load(row_weight_ptr + slots, mask=in_expert, other=0.0)
                    y *= widen(weight).to(gl.float32)[:, None]
            barrier()  # the last tile has left the buffer
            out_buffer.store(narrow(y, out_ptr.dtype.element_ty))
            barrier()
            out_rows = first_row + gl.arange(0, PART, layout=gl.SliceLayout(1, STORED))
            columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, STORED)) + tile_n * COLUMNS
            ptrs = out_ptr + out_rows.to(gl.int64)[:, None] * stride_out + columns[None, :]
            mask = (out_rows < end_row)[:, None] & (columns < N)[None, :]
            gl.store(ptrs, out_buffer.load(STORED), mask=mask)
        else:
            for _ in range(num_steps):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = _next(stage, phase, FORM)


@gluon.jit(do_not_specialize=["alpha", "limit"])
def _fp8_blocks_kernel(
    out_ptr,  # (S, N)  written
    a_desc,  # (S, D) e4m3, in boxes of 64 × 128
    w_desc,  # (E · N, D) e4m3; GATED: (E · 2N, D); likewise
    a_scale_ptr,  # (S, cdiv(D, 128)) fp32, those of a column of blocks beside each other
    w_scale_ptr,  # (E, cdiv(N, 128), cdiv(D, 128)) fp32
    bias_ptr,  # (E, N); GATED: (E, 2N); or None
    row_weight_ptr,  # (T·K,) or None
    row_to_slot_ptr,  # (S,)
    tiles_ptr,  # (max_tiles, 3)  expert, first row, end row
    num_tiles_ptr,  # (1,)
    S, N, D, stride_out, a_scale_strides, w_scale_strides, bias_strides, alpha, limit,
    FORM: gl.constexpr, LOADER_REGISTERS: gl.constexpr, MULTIPLIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: (multiprocessors,). A program takes tile after tile."""
    COLUMNS: gl.constexpr = W_ROWS // FORM.w_rows_per_column
    PARTS: gl.constexpr = FORM.parts
    STAGES: gl.constexpr = FORM.stages
    codes: gl.constexpr = a_desc.dtype
    a_ring = gl.allocate_shared_memory(codes, [STAGES * PARTS, PART, STEP], a_desc.layout)
    w_ring = gl.allocate_shared_memory(codes, [STAGES * 2, PART, STEP], w_desc.layout)
    rows_of_128_bytes: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    out_buffers = gl.allocate_shared_memory(
        out_ptr.dtype.element_ty, [PARTS, PART, COLUMNS], rows_of_128_bytes
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    operands = (a_desc, w_desc)
    tiles = (tiles_ptr, num_tiles_ptr, N, D)
    rings = (a_ring, w_ring, full, empty)
    scales = (a_scale_ptr, w_scale_ptr, a_scale_strides, w_scale_strides, S)
    result = (
        (out_ptr, bias_ptr, row_weight_ptr, row_to_slot_ptr),
        (stride_out, bias_strides, alpha, limit),
    )
    if PARTS == 3:
        gl.warp_specialize(
            [
                (_multiplier, (scales, result, tiles, rings, out_buffers, FORM, 0)),
                (_multiplier, (scales, result, tiles, rings, out_buffers, FORM, 1)),
                (_multiplier, (scales, result, tiles, rings, out_buffers, FORM, 2)),
                (_loader, (operands, tiles, rings, FORM)),
            ],
            [4, 4, 1],
            [MULTIPLIER_REGISTERS, MULTIPLIER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiplier, (scales, result, tiles, rings, out_buffers, FORM, 0)),
                (_multiplier, (scales, result, tiles, rings, out_buffers, FORM, 1)),
                (_loader, (operands, tiles, rings, FORM)),
            ],
            [4, 1],
            [MULTIPLIER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip


def fp8_blocks_gemm(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    order: SortedTokens,
    tile: Tile,
    scales: Scales,
    *,
    bias: Tensor | None,
    row_weight: Tensor | None,
    activation: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> Tensor:
    """What `grouped_gemm` writes to `out` (S, N), here bf16.

    a: (S, D) float8_e4m3fn in expert order; scales.rows (S, cdiv(D, 128)), those of a column of
    blocks beside each other. w must be `is_one_matrix` and, if its halves are gate and up rows, N a
    multiple of 64. row_weight: only if not gated.
    """
    D, N, parts = a.shape[1], out.shape[1], tile.block_m // PART.value
    tiles_n = cdiv(w.shape[1], W_ROWS.value)
    programs = min(num_multiprocessors(out.device), order.tiles.shape[0] * tiles_n)
    if programs == 0:
        return out
    assert scales.weight is not None and scales.rows is not None
    codes = gl.NVMMASharedLayout(128, 8, rank=2)
    box, w_rows = [PART.value, STEP.value], w.flatten(0, 1)
    _fp8_blocks_kernel[(programs,)](
        out,
        TensorDescriptor(a, list(a.shape), list(a.stride()), box, codes),
        TensorDescriptor(w_rows, list(w_rows.shape), list(w_rows.stride()), box, codes),
        scales.rows, scales.weight, bias, row_weight,
        order.row_to_slot, order.tiles, order.num_tiles,
        len(a), N, D, out.stride(0), scales.rows.stride(), scales.weight.stride(),
        (0, 0) if bias is None else bias.stride(), alpha, limit,
        FORM=Form(activation, gated, interleaved, tile.group_m, parts, tile.num_stages),
        LOADER_REGISTERS=LOADER_REGISTERS, MULTIPLIER_REGISTERS=MULTIPLIER_REGISTERS[parts],
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out
