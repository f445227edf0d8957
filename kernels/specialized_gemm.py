"""The down projection on Hopper: 16-bit rows times weights, by specialised warps.

    y[r, n] = (sum_d a[r, d] · w[e, n, d] + bias[e, n]) · row_weight[r]

What `grouped_gemm` computes of rows in expert order, bit for bit. There all warps of a program
load, multiply and store, one after the other. Here they share a tile of 128 rows × 256 columns and
have different jobs:

    loader       one warp. Takes tile after tile from a common counter, and asks the TMA for the
                 next 64 of the depth as soon as a slot of the ring in shared memory is empty.
    multipliers  two groups of four warps, 64 rows each. They wait until a slot is full, multiply,
                 and give it back. While they store their results, the loader goes on to the next
                 tile.

In a tile of no more than 64 rows, an expert's last, the second multiplier has nothing to do, and
the first one has the tensor cores to itself. A slot is `full` when all bytes that were announced
have come, and `empty` when both multipliers have read it. Beside a tile's first slot stand four
words about it.

Triton compiles all warps to one program; this is Gluon, its lower level, where layouts of registers
and barriers are explicit. It isn't interpreted: the tests compare it with `grouped_gemm` on a GPU.
S rows, E experts, N output columns, D depth (contracted).
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.fp8_blocks_loader import barrier, load_box, read_word, write_words
from tmoe.kernels.gemm_tile import load_tile, tile_position
from tmoe.kernels.launch import cdiv, launch, num_multiprocessors
from tmoe.kernels.sort import SortedTokens

ROWS = gl.constexpr(64)  # of a multiplier, and of a box of a
COLUMNS = gl.constexpr(256)  # of a tile
STEP = gl.constexpr(64)  # of the depth
STAGES = gl.constexpr(4)  # slots of the ring
PIECE = gl.constexpr(128)  # columns that are stored at a time
A_BYTES, W_BYTES = gl.constexpr(64 * 64 * 2), gl.constexpr(256 * 64 * 2)
LOADER_REGISTERS, MULTIPLIER_REGISTERS = 24, 240
ONE_WORD = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
PRODUCT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
)
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def _next_slot(stage, phase):
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _loader(operands, tiles, rings, GROUP_M: gl.constexpr):
    """One warp: fill slot after slot, for tile after tile."""
    a_desc, w_desc = operands
    tiles_ptr, num_tiles_ptr, taken_ptr, N, D = tiles
    a_ring, w_ring, full, empty, words = rings
    num_tiles, programs = gl.load(num_tiles_ptr), gl.num_programs(0)
    tiles_n = gl.cdiv(N, COLUMNS)
    num_items = num_tiles * tiles_n
    stage, phase = 0, 1
    item = gl.atomic_add(taken_ptr, 1, sem="relaxed")
    while item < num_items:
        following = gl.atomic_add(taken_ptr, 1, sem="relaxed")  # now: an answer takes a while
        tile_m, tile_n = tile_position(item, num_tiles, tiles_n, GROUP_M)
        expert, first_row, end_row = load_tile(tiles_ptr, tile_m)
        has_two_parts = end_row - first_row > ROWS
        mbarrier.wait(empty.index(stage), phase)  # so the words there have been read, too
        write_words(words, stage * 4, expert, first_row, end_row, tile_n)
        for d in range(0, D, STEP):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, W_BYTES)
            mbarrier.expect(bar, 2 * A_BYTES, pred=has_two_parts)
            mbarrier.expect(bar, A_BYTES, pred=end_row - first_row <= ROWS)
            load_box(w_desc, [expert * N + tile_n * COLUMNS, d], bar, w_ring.index(stage))
            box = stage * 2
            load_box(a_desc, [first_row, d], bar, a_ring.index(box))
            load_box(a_desc, [first_row + ROWS, d], bar, a_ring.index(box + 1), pred=has_two_parts)
            stage, phase = _next_slot(stage, phase)
        item = following
    mbarrier.wait(empty.index(stage), phase)
    write_words(words, stage * 4, -1, 0, 0, 0)
    mbarrier.arrive(full.index(stage), count=2)
    if item == num_items + programs - 1:  # nobody takes another one
        gl.store(taken_ptr, 0)


@gluon.jit
def _weighted(result, acc, expert, rows, columns, end_row, N):
    """The sums [64, 256] with their bias and times the routing weight, in fp32."""
    _out_ptr, bias_ptr, row_weight_ptr, row_to_slot_ptr = result[0]
    _stride_out, bias_strides = result[1]
    if bias_ptr is not None:
        ptrs = bias_ptr + expert.to(gl.int64) * bias_strides[0] + columns * bias_strides[1]
        acc += widen(gl.load(ptrs, mask=columns < N, other=0.0)).to(gl.float32)[None, :]
    if row_weight_ptr is not None:
        in_expert = rows < end_row
        slots = gl.load(row_to_slot_ptr + rows, mask=in_expert, other=0)
        weight = gl.load(row_weight_ptr + slots, mask=in_expert, other=0.0)
        acc *= widen(weight).to(gl.float32)[:, None]
    return acc


@gluon.jit
def _store(result, buffer, piece, first_row, end_row, first_column, N):
    """Through shared memory, so that neighbouring threads write neighbouring columns."""
    barrier()  # the last piece has left the buffer
    buffer.store(piece)
    barrier()
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
    columns = first_column + gl.arange(0, PIECE, layout=gl.SliceLayout(0, STORED))
    ptrs = result[0][0] + rows.to(gl.int64)[:, None] * result[1][0] + columns[None, :]
    mask = (rows < end_row)[:, None] & (columns < N)[None, :]
    gl.store(ptrs, buffer.load(STORED), mask=mask)


@gluon.jit
def _multiplier(result, shape, rings, out_buffers, NUMBER: gl.constexpr):
    N, D = shape
    a_ring, w_ring, full, empty, words = rings
    num_steps = gl.cdiv(D, STEP)
    stage, phase = 0, 0
    mbarrier.wait(full.index(stage), phase)
    expert = read_word(words, stage * 4)
    while expert >= 0:
        first_row, end_row = read_word(words, stage * 4 + 1), read_word(words, stage * 4 + 2)
        first_column = read_word(words, stage * 4 + 3) * COLUMNS
        first_row += NUMBER * ROWS
        if first_row < end_row:
            acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout=PRODUCT)
            for _step in range(num_steps):
                mbarrier.wait(full.index(stage), phase)
                a_tile, w_tile = a_ring.index(stage * 2 + NUMBER), w_ring.index(stage)
                acc = warpgroup_mma(a_tile, w_tile.permute((1, 0)), acc, is_async=True)
                # None in flight: a slot is empty a step earlier, and the other multiplier's product
                # runs meanwhile.
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = _next_slot(stage, phase)
            rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, PRODUCT))
            columns = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PRODUCT))
            y = narrow(_weighted(result, acc, expert, rows, columns, end_row, N), a_ring.dtype)
            left, right = y.reshape((ROWS, 2, PIECE)).permute((0, 2, 1)).split()
            buffer = out_buffers.index(NUMBER)
            _store(result, buffer, left, first_row, end_row, first_column, N)
            _store(result, buffer, right, first_row, end_row, first_column + PIECE, N)
        else:
            for _step in range(num_steps):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = _next_slot(stage, phase)
        mbarrier.wait(full.index(stage), phase)
        expert = read_word(words, stage * 4)


@gluon.jit
def _specialized_gemm_kernel(
    out_ptr,  # (S, N)  written
    a_desc,  # (S, D), in boxes of 64 × 64
    w_desc,  # (E · N, D), in boxes of 256 × 64
    bias_ptr,  # (E, N), or None
    row_weight_ptr,  # (T·K,) or None
    row_to_slot_ptr,  # (S,)
    tiles_ptr,  # (max_tiles, 3)  expert, first row, end row
    num_tiles_ptr,  # (1,)
    taken_ptr,  # (1,)  0, and again 0 at the end
    N, D, stride_out, bias_strides,
    GROUP_M: gl.constexpr, LOADER_REGISTERS: gl.constexpr, MULTIPLIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: (multiprocessors,). A program takes tile after tile."""
    number: gl.constexpr = a_desc.dtype
    a_ring = gl.allocate_shared_memory(number, [STAGES * 2, ROWS, STEP], a_desc.layout)
    w_ring = gl.allocate_shared_memory(number, [STAGES, COLUMNS, STEP], w_desc.layout)
    out_buffers = gl.allocate_shared_memory(
        number, [2, ROWS, PIECE], gl.NVMMASharedLayout.get_default_for([ROWS, PIECE], number)
    )
    words = gl.allocate_shared_memory(gl.int32, [STAGES * 4, 1], ONE_WORD)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # the bytes of w, and those of a
        mbarrier.init(empty.index(i), count=2)  # both multipliers
    fence_async_shared()
    tiles = (tiles_ptr, num_tiles_ptr, taken_ptr, N, D)
    rings = (a_ring, w_ring, full, empty, words)
    result = ((out_ptr, bias_ptr, row_weight_ptr, row_to_slot_ptr), (stride_out, bias_strides))
    gl.warp_specialize(
        [
            (_multiplier, (result, (N, D), rings, out_buffers, 0)),
            (_multiplier, (result, (N, D), rings, out_buffers, 1)),
            (_loader, ((a_desc, w_desc), tiles, rings, GROUP_M)),
        ],
        [4, 1],
        [MULTIPLIER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


def specialized_gemm(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    order: SortedTokens,
    group_m: int,
    *,
    bias: Tensor | None,
    row_weight: Tensor | None,
) -> Tensor:
    """What `grouped_gemm` writes to `out` (S, N) of a (S, D) in expert order and w (E, N, D), which
    must be `is_one_matrix`. bf16 or fp16; group_m row tiles go through the columns together."""
    D, N = a.shape[1], out.shape[1]
    programs = min(num_multiprocessors(out.device), order.tiles.shape[0] * cdiv(N, COLUMNS.value))
    if programs == 0:
        return out
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    w_rows = w.flatten(0, 1)
    launch(
        _specialized_gemm_kernel, (programs,), out,
        TensorDescriptor(a, list(a.shape), list(a.stride()), [ROWS.value, STEP.value], layout),
        TensorDescriptor(
            w_rows, list(w_rows.shape), list(w_rows.stride()), [COLUMNS.value, STEP.value], layout
        ),
        bias, row_weight, order.row_to_slot, order.tiles, order.num_tiles, order.taken,
        N, D, out.stride(0), (0, 0) if bias is None else bias.stride(),
        GROUP_M=group_m, LOADER_REGISTERS=LOADER_REGISTERS,
        MULTIPLIER_REGISTERS=MULTIPLIER_REGISTERS, num_warps=4,
    )  # fmt: skip
    return out
