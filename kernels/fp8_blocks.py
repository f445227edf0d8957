"""FP8 blocks on Hopper: the grouped GEMM by specialised warps.

    y[r, n] = act(sum_b s_a[r, b] · s_w[n / 128, b] · (a[r, b] · w[e, n, b]) + bias[e, n])

What `grouped_gemm` computes of e4m3 codes with scales for 128 of the depth (b), in expert order.
There a program's tile can't be large, since every step's product has registers of its own beside
the total, and with small tiles the L2 cache is what limits. Here the warps of a program share a
tile of 128 rows × 256 weight rows, and have different jobs:

    loader       one warp. Takes tile after tile, and asks the TMA for the next step's codes as soon
                 as a slot of the ring in shared memory is empty.
    multipliers  two groups of four warps. They wait until a slot is full, multiply 64 rows by 128
                 weight rows, and add the product times its scales in fp32. They drift apart, so
                 that while one adds, the other keeps the tensor cores busy.

The weight rows of a tile are two halves of 128; of a gated projection a half is 64 gate rows and
their 64 up rows. A multiplier has 64 rows of its own and goes through both halves, one after the
other. In a tile of no more than 64 rows both multipliers have the same rows, and a half each.

Programs take tiles from a common counter, since tiles don't take the same time. The last ones are
taken as halves, so that all programs end at about the same time.

Triton compiles all warps to one program; this is Gluon, its lower level, where layouts of registers
and barriers are explicit. It isn't interpreted: the tests compare it with `grouped_gemm` on a GPU.
The loader is in `fp8_blocks_loader.py`; what becomes of the sums, in `fp8_blocks_result.py`.
S rows, E experts, N output columns, D depth (contracted).
"""

from __future__ import annotations

import math

import torch
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

from tmoe.kernels.fp8_blocks_loader import (
    HALF,
    PART,
    STEP,
    W_ROWS,
    Form,
    first_w_rows,
    loader,
    next_slot,
    read_word,
    reinterpret,
)
from tmoe.kernels.fp8_blocks_result import PRODUCT, finish
from tmoe.kernels.launch import cdiv, launch, num_multiprocessors
from tmoe.kernels.sort import SortedTokens
from tmoe.kernels.tiles import Tile
from tmoe.kernels.weight_codes import Scales

LOADER_REGISTERS, MULTIPLIER_REGISTERS = 24, 240
ONE_WORD = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def _scale_ptrs(scales, expert, half, N, FORM: gl.constexpr):
    """Of a half's first and second 64 weight rows. Rows that don't exist have the last one's."""
    ptr, strides = scales[1], scales[3]
    first, second = first_w_rows(half, N, FORM)
    last = N * FORM.w_rows_per_column - 1
    ptr += expert.to(gl.int64) * strides[0]
    return (
        ptr + gl.minimum(first, last) // STEP * strides[1],
        ptr + gl.minimum(second, last) // STEP * strides[1],
    )


@gluon.jit
def _add_product(acc, a_codes, w_codes, of_a, of_w, FORM: gl.constexpr):
    """acc + a · wᵀ · scales of one step, [64, 128]."""
    if FORM.in_halves:
        columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, PRODUCT))
        factor = of_a[:, None] * gl.where(columns < PART, of_w[0], of_w[1])[None, :]
    else:
        factor = (of_a * of_w[0])[:, None]
    zero = gl.zeros((PART, HALF), gl.float32, layout=PRODUCT)
    product = warpgroup_mma(a_codes, w_codes.permute((1, 0)), zero, use_acc=False, is_async=True)
    product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
    # An instruction that the compiler leaves where it is. It would put off `gl.fma` until after the
    # next product, for which there would be no registers.
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, factor, acc],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _multiplier(scales, result, shape, rings, shared, FORM: gl.constexpr, NUMBER: gl.constexpr):
    a_scale_ptr, _w_scale_ptr, a_strides, w_strides, num_rows = scales
    N, D = shape
    a_ring, w_ring, full, empty, items = rings
    num_steps = gl.cdiv(D, STEP)
    w_halves = reinterpret(w_ring, w_ring.dtype, [FORM.stages * 2, HALF, STEP], w_ring.layout)
    stage, phase, turn = 0, 0, 0
    mbarrier.wait(full.index(stage), phase)
    expert = read_word(items, stage * 4)
    while expert >= 0:
        first_row, end_row = read_word(items, stage * 4 + 1), read_word(items, stage * 4 + 2)
        halves = read_word(items, stage * 4 + 3)
        is_whole = halves % 2 == 1
        shares_rows = is_whole & (end_row - first_row <= PART)
        has_both = is_whole & (end_row - first_row > PART)
        own_part = gl.where(shares_rows, 0, NUMBER)
        half = halves // 2 + gl.where(shares_rows, NUMBER, 0)
        own_half = half % 2
        first_row += own_part * PART
        ptrs = _scale_ptrs(scales, expert, half, N, FORM)
        more_ptrs = _scale_ptrs(scales, expert, half + 1, N, FORM)
        rows = first_row + gl.arange(0, PART, layout=gl.SliceLayout(1, PRODUCT))
        a_ptrs = gl.minimum(rows, num_rows - 1).to(gl.int64) * a_strides[0] + a_scale_ptr
        of_a, of_w = gl.load(a_ptrs), (gl.load(ptrs[0]), gl.load(ptrs[1]))
        of_more = of_w
        if not FORM.shares_scales:
            of_more = (gl.load(more_ptrs[0]), gl.load(more_ptrs[1]))
        acc = gl.zeros((PART, HALF), gl.float32, layout=PRODUCT)
        more = acc
        for step in range(num_steps):
            # The next step's scales are loaded here: there is time while this one multiplies.
            ahead = gl.minimum(step + 1, num_steps - 1)
            next_a = gl.load(a_ptrs + ahead.to(gl.int64) * a_strides[1])
            offset = ahead * w_strides[2]
            next_w = (gl.load(ptrs[0] + offset), gl.load(ptrs[1] + offset))
            next_more = next_w
            if not FORM.shares_scales:
                next_more = (gl.load(more_ptrs[0] + offset), gl.load(more_ptrs[1] + offset))
            mbarrier.wait(full.index(stage), phase)
            a_codes = a_ring.index(stage * 2 + own_part)
            acc = _add_product(acc, a_codes, w_halves.index(stage * 2 + own_half), of_a, of_w, FORM)
            if has_both:
                w_codes = w_halves.index(stage * 2 + 1)
                more = _add_product(more, a_codes, w_codes, of_a, of_more, FORM)
            mbarrier.arrive(empty.index(stage), count=1)
            of_a, of_w, of_more = next_a, next_w, next_more
            stage, phase = next_slot(stage, phase, FORM)
        own = (expert, first_row, end_row, half, N)
        if has_both:
            finish(result, shared, acc, more, own, turn, FORM, NUMBER, True)
        else:
            finish(result, shared, acc, more, own, turn, FORM, NUMBER, False)
            turn ^= 1
        mbarrier.wait(full.index(stage), phase)
        expert = read_word(items, stage * 4)


@gluon.jit(do_not_specialize=["alpha", "limit"])
def _fp8_blocks_kernel(
    out_ptr,  # (S, N)  written; bytes of e4m3 codes if there are scales of them
    a_desc,  # (S, D) e4m3, in boxes of 64 × 128
    w_desc,  # (E · N, D) e4m3; GATED: (E · 2N, D); likewise
    a_scale_ptr,  # (S, cdiv(D, 128)) fp32
    w_scale_ptr,  # (E, cdiv(N, 128), cdiv(D, 128)) fp32
    out_scale_ptr,  # (S, cdiv(N, 128)) fp32  written; or None
    bias_ptr,  # (E, N); GATED: (E, 2N); or None
    row_weight_ptr,  # (T·K,) or None
    row_to_slot_ptr,  # (S,)
    tiles_ptr,  # (max_tiles, 3)  expert, first row, end row
    num_tiles_ptr,  # (1,)
    taken_ptr,  # (1,)  0, and again 0 at the end
    S, N, D, stride_out, a_scale_strides, w_scale_strides, out_scale_strides, bias_strides,
    alpha, limit,
    FORM: gl.constexpr, LOADER_REGISTERS: gl.constexpr, MULTIPLIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: (multiprocessors,). A program takes tile after tile."""
    STAGES: gl.constexpr = FORM.stages
    codes: gl.constexpr = a_desc.dtype
    a_ring = gl.allocate_shared_memory(codes, [STAGES * 2, PART, STEP], a_desc.layout)
    w_ring = gl.allocate_shared_memory(codes, [STAGES * 4, PART, STEP], w_desc.layout)
    out_buffers = gl.allocate_shared_memory(
        out_ptr.dtype.element_ty, [2, PART, FORM.columns],
        gl.NVMMASharedLayout.get_default_for([PART, FORM.columns], out_ptr.dtype.element_ty),
    )  # fmt: skip
    maxima = gl.allocate_shared_memory(gl.float32, [4, PART], ONE_WORD)
    items = gl.allocate_shared_memory(gl.int32, [STAGES * 4, 1], ONE_WORD)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    known = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # the bytes of w, and those of a
        mbarrier.init(empty.index(i), count=2)  # both multipliers
    for i in gl.static_range(2):
        mbarrier.init(known.index(i), count=1)
    fence_async_shared()
    operands = (a_desc, w_desc)
    tiles = (tiles_ptr, num_tiles_ptr, taken_ptr, N, D)
    rings = (a_ring, w_ring, full, empty, items)
    shared = (out_buffers, maxima, known)
    scales = (a_scale_ptr, w_scale_ptr, a_scale_strides, w_scale_strides, S)
    result = (
        (out_ptr, out_scale_ptr, bias_ptr, row_weight_ptr, row_to_slot_ptr),
        (stride_out, out_scale_strides, bias_strides, alpha, limit),
    )
    gl.warp_specialize(
        [
            (_multiplier, (scales, result, (N, D), rings, shared, FORM, 0)),
            (_multiplier, (scales, result, (N, D), rings, shared, FORM, 1)),
            (loader, (operands, tiles, rings, FORM)),
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
    """What `grouped_gemm` writes to `out` (S, N), here bf16, or codes and their scales.

    a: (S, D) float8_e4m3fn in expert order; scales.rows (S, cdiv(D, 128)), any strides. w must be
    `is_one_matrix` and, if its halves are gate and up rows, N a multiple of 64. row_weight: only if
    not gated. With scales.out_blocks `out` is float8_e4m3fn, and both are written as `quantize_fp8`
    makes them of the result in fp32.
    """
    D, N = a.shape[1], out.shape[1]
    tiles_n = cdiv(w.shape[1], W_ROWS.value)
    programs = min(num_multiprocessors(out.device), order.tiles.shape[0] * tiles_n)
    if programs == 0:
        return out
    assert scales.weight is not None and scales.rows is not None
    codes = gl.NVMMASharedLayout(128, 8, rank=2)
    box, w_rows, of_out = [PART.value, STEP.value], w.flatten(0, 1), scales.out_blocks
    form = Form(
        activation, gated, interleaved, tile.group_m, tile.num_stages,
        splits=not gated or of_out is None,
        shares_scales=gated and not interleaved and N % STEP.value == 0,
    )  # fmt: skip
    launch(
        _fp8_blocks_kernel, (programs,),
        out if of_out is None else out.view(torch.uint8),
        TensorDescriptor(a, list(a.shape), list(a.stride()), box, codes),
        TensorDescriptor(w_rows, list(w_rows.shape), list(w_rows.stride()), box, codes),
        scales.rows, scales.weight, of_out, bias, row_weight,
        order.row_to_slot, order.tiles, order.num_tiles, order.taken,
        len(a), N, D, out.stride(0), scales.rows.stride(), scales.weight.stride(),
        (0, 0) if of_out is None else of_out.stride(),
        (0, 0) if bias is None else bias.stride(), alpha, None if limit == math.inf else limit,
        FORM=form, LOADER_REGISTERS=LOADER_REGISTERS, MULTIPLIER_REGISTERS=MULTIPLIER_REGISTERS,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out
