"""What the warps of `fp8_blocks.py` have in common, and the one of them that loads.

The ring in shared memory has so many slots, each with room for a step of the depth of a tile: 2
boxes of a and 4 of w, of 64 rows × 128 codes. A slot is `full` when all bytes that were announced
have come, and `empty` when both multipliers have read it. Beside a tile's first slot stand four
words about the tile. What is taken from the counter is a whole tile or, at the end, half of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tmoe.kernels.gemm_tile import load_tile, tile_position

STEP = gl.constexpr(128)  # of the depth, which has one scale
PART = gl.constexpr(64)  # rows of a multiplier, and of a box
HALF = gl.constexpr(128)  # weight rows that it multiplies by at a time
W_ROWS = gl.constexpr(256)  # that a tile multiplies by
BOX_BYTES = gl.constexpr(64 * 128)

# Renamed in Triton 3.7 and 3.9.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_descriptor = gl.shared_memory_descriptor
reinterpret = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret


@dataclass(frozen=True, slots=True)
class Form:
    """What the kernel is compiled for."""

    activation: str
    gated: bool
    interleaved: bool
    group_m: int
    stages: int  # slots of the ring
    splits: bool  # the last tiles into their halves
    shares_scales: bool  # both halves of a tile have the same scales

    @property
    def in_halves(self) -> bool:
        """Whether the weight rows are all gate rows first, then all up rows."""
        return self.gated and not self.interleaved

    @property
    def w_rows_per_column(self) -> int:
        return 2 if self.gated else 1

    @property
    def columns(self) -> int:
        """Of the result that half of a tile's weight rows give."""
        return HALF.value // self.w_rows_per_column


@gluon.jit
def next_slot(stage, phase, FORM: gl.constexpr):
    """The ring's next slot; barriers change their phase from round to round."""
    wraps = stage + 1 == FORM.stages
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def first_w_rows(half, N, FORM: gl.constexpr):
    """Where the first and the second 64 weight rows of a half start, within an expert."""
    if FORM.in_halves:
        return half * PART, N + half * PART
    else:
        return half * HALF, half * HALF + PART


@gluon.jit
def _write_words(words, first, expert, first_row, end_row, halves):
    """What the multipliers must know of a tile, by one warp. expert: -1 after the last tile.
    halves: twice the (first) half's number, plus 1 if the other one belongs to it."""
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    words.index(first).store(gl.full([1], expert, gl.int32, WARP))
    words.index(first + 1).store(gl.full([1], first_row, gl.int32, WARP))
    words.index(first + 2).store(gl.full([1], end_row, gl.int32, WARP))
    words.index(first + 3).store(gl.full([1], halves, gl.int32, WARP))


@gluon.jit
def read_word(words, index):
    """One of the words, by four warps."""
    return gl.max(words.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def loader(operands, tiles, rings, FORM: gl.constexpr):
    """One warp: fill slot after slot, for tile after tile."""
    a_desc, w_desc = operands
    tiles_ptr, num_tiles_ptr, taken_ptr, N, D = tiles
    a_ring, w_ring, full, empty, items = rings
    num_tiles, programs = gl.load(num_tiles_ptr), gl.num_programs(0)
    N_W = N * FORM.w_rows_per_column
    tiles_n = gl.cdiv(N_W, W_ROWS)
    # Items to be taken: so many whole tiles, then the halves of the others.
    whole = num_tiles * tiles_n
    num_items = whole
    if FORM.splits:
        whole = gl.maximum(whole - programs // 2, 0)
        num_items = 2 * num_items - whole
    stage, phase = 0, 1
    item = gl.atomic_add(taken_ptr, 1, sem="relaxed")
    while item < num_items:
        following = gl.atomic_add(taken_ptr, 1, sem="relaxed")  # now: an answer takes a while
        is_whole, past_whole = item < whole, gl.maximum(item - whole, 0)
        own_half = past_whole % 2  # 0 if it is whole
        tile = gl.minimum(item, whole + past_whole // 2)
        tile_m, tile_n = tile_position(tile, num_tiles, tiles_n, FORM.group_m)
        expert, first_row, end_row = load_tile(tiles_ptr, tile_m)
        has_two_parts = end_row - first_row > PART
        mbarrier.wait(empty.index(stage), phase)  # so the words there have been read, too
        halves = (2 * tile_n + own_half) * 2 + is_whole.to(gl.int32)
        _write_words(items, stage * 4, expert, first_row, end_row, halves)
        for d in range(0, D, STEP):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, 4 * BOX_BYTES, pred=is_whole)
            if FORM.splits:
                mbarrier.expect(bar, 2 * BOX_BYTES, pred=item >= whole)
            for i in gl.static_range(2):
                first_w, second_w = first_w_rows(2 * tile_n + i, N, FORM)
                first_w, second_w = expert * N_W + first_w, expert * N_W + second_w
                box, wanted = stage * 4 + 2 * i, is_whole | (own_half == i)
                load_box(w_desc, [first_w, d], bar, w_ring.index(box), pred=wanted)
                load_box(w_desc, [second_w, d], bar, w_ring.index(box + 1), pred=wanted)
            mbarrier.expect(bar, 2 * BOX_BYTES, pred=has_two_parts)
            mbarrier.expect(bar, BOX_BYTES, pred=end_row - first_row <= PART)
            box = stage * 2
            load_box(a_desc, [first_row, d], bar, a_ring.index(box))
            load_box(a_desc, [first_row + PART, d], bar, a_ring.index(box + 1), pred=has_two_parts)
            stage, phase = next_slot(stage, phase, FORM)
        item = following
    mbarrier.wait(empty.index(stage), phase)
    _write_words(items, stage * 4, -1, 0, 0, 0)
    mbarrier.arrive(full.index(stage), count=2)
    if item == num_items + programs - 1:  # nobody takes another one
        gl.store(taken_ptr, 0)
