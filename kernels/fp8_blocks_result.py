"""What a multiplier of `fp8_blocks.py` does with its sums: bias, activation, and how they are
stored, as bf16 or as e4m3 codes.

    code, scale = quantize_fp8(y, block=(1, 128))        of y in fp32

The codes are what the next projection multiplies, with scales for 128 columns of a row. A
multiplier that has only half of them hears the other half's largest number from the other one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tmoe.kernels.activation import activate, activate_gated
from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.fp8_blocks_loader import HALF, PART, barrier
from tmoe.kernels.gemm_tile import weight_rows
from tmoe.kernels.rounding import amax, e4m3_codes, e4m3_scale, larger

PRODUCT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
)


@gluon.jit
def _activated(result, acc, expert, first_row, end_row, half, N, FORM: gl.constexpr):
    """From the sums [64, 128] of a half to its result [64, FORM.columns], in fp32."""
    _out_ptr, _out_scale_ptr, bias_ptr, row_weight_ptr, row_to_slot_ptr = result[0]
    _stride_out, _out_scale_strides, bias_strides, alpha, limit = result[1]
    ACTIVATION: gl.constexpr = FORM.activation
    if bias_ptr is not None:
        columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, PRODUCT))
        columns = weight_rows(half, columns, N, FORM.gated, FORM.interleaved, FORM.columns)
        ptrs = bias_ptr + expert.to(gl.int64) * bias_strides[0] + columns * bias_strides[1]
        acc += widen(gl.load(ptrs)).to(gl.float32)[None, :]
    if FORM.gated:
        if FORM.interleaved:
            gate, up = acc.reshape((PART, FORM.columns, 2)).split()
        else:
            gate, up = acc.reshape((PART, 2, FORM.columns)).permute((0, 2, 1)).split()
        y = activate_gated(gate, up, alpha, limit, ACTIVATION)
    else:
        y = activate(acc, ACTIVATION)
        if row_weight_ptr is not None:
            rows = first_row + gl.arange(0, PART, layout=gl.SliceLayout(1, PRODUCT))
            in_expert = rows < end_row
            slots = gl.load(row_to_slot_ptr + rows, mask=in_expert, other=0)
            weight = gl.load(row_weight_ptr + slots, mask=in_expert, other=0.0)
            y *= widen(weight).to(gl.float32)[:, None]
    return y


@gluon.jit
def _largest(y, half, N, FORM: gl.constexpr):
    """max |y| of each row's columns that exist."""
    columns = gl.arange(0, FORM.columns, layout=gl.SliceLayout(0, y.type.layout))
    return amax(gl.where((half * FORM.columns + columns < N)[None, :], y, 0.0), 1, False)


@gluon.jit
def _larger_of_both(largest, shared, turn, NUMBER: gl.constexpr):
    """The larger of what the two multipliers have found. There are two places for it in turn: the
    other one may still be reading the last."""
    _out_buffers, maxima, known = shared
    maxima.index(turn * 2 + NUMBER).store(largest)
    barrier()
    mbarrier.arrive(known.index(NUMBER), count=1)
    mbarrier.wait(known.index(1 - NUMBER), turn)
    return larger(largest, maxima.index(turn * 2 + 1 - NUMBER).load(largest.type.layout))


@gluon.jit
def _store_scale(result, scale, first_row, end_row, block, N):
    ptr, strides = result[0][1], result[1][1]
    rows = first_row + gl.arange(0, PART, layout=scale.type.layout)
    ptrs = ptr + rows.to(gl.int64) * strides[0] + block.to(gl.int64) * strides[1]
    gl.store(ptrs, scale, mask=(rows < end_row) & (block * HALF < N))


@gluon.jit
def _store(result, buffer, y, first_row, end_row, half, N, FORM: gl.constexpr):
    """Through shared memory, so that neighbouring threads write neighbouring columns."""
    COLUMNS: gl.constexpr = FORM.columns
    EACH: gl.constexpr = 128 // y.dtype.primitive_bitwidth  # 16 bytes
    ACROSS: gl.constexpr = COLUMNS // EACH
    STORED: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    barrier()  # the last half has left the buffer
    buffer.store(y)
    barrier()
    rows = first_row + gl.arange(0, PART, layout=gl.SliceLayout(1, STORED))
    columns = half * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, STORED))
    ptrs = result[0][0] + rows.to(gl.int64)[:, None] * result[1][0] + columns[None, :]
    mask = (rows < end_row)[:, None] & (columns < N)[None, :]
    gl.store(ptrs, buffer.load(STORED), mask=mask)


@gluon.jit
def finish(
    result, shared, acc, more, own, turn,
    FORM: gl.constexpr, NUMBER: gl.constexpr, BOTH: gl.constexpr,
):  # fmt: skip
    """Store what becomes of the sums `acc` [64, 128] of a half and, if BOTH, `more` of the next."""
    expert, first_row, end_row, half, N = own
    out_ptr, out_scale_ptr = result[0][0], result[0][1]
    buffer = shared[0].index(NUMBER)
    y = _activated(result, acc, expert, first_row, end_row, half, N, FORM)
    if BOTH:
        y_more = _activated(result, more, expert, first_row, end_row, half + 1, N, FORM)
    if out_scale_ptr is None:
        y = narrow(y, out_ptr.dtype.element_ty)
        _store(result, buffer, y, first_row, end_row, half, N, FORM)
        if BOTH:
            y_more = narrow(y_more, out_ptr.dtype.element_ty)
            _store(result, buffer, y_more, first_row, end_row, half + 1, N, FORM)
    else:
        largest = _largest(y, half, N, FORM)
        if FORM.gated:  # both halves' columns are one block
            if BOTH:
                largest = larger(largest, _largest(y_more, half + 1, N, FORM))
            else:
                largest = _larger_of_both(largest, shared, turn, NUMBER)
            scale = e4m3_scale(largest)
            scale_more = scale
            _store_scale(result, scale, first_row, end_row, half // 2, N)
        else:
            scale = e4m3_scale(largest)
            _store_scale(result, scale, first_row, end_row, half, N)
            if BOTH:
                scale_more = e4m3_scale(_largest(y_more, half + 1, N, FORM))
                _store_scale(result, scale_more, first_row, end_row, half + 1, N)
        codes = e4m3_codes(y, scale[:, None])
        _store(result, buffer, codes, first_row, end_row, half, N, FORM)
        if BOTH:
            codes = e4m3_codes(y_more, scale_more[:, None])
            _store(result, buffer, codes, first_row, end_row, half + 1, N, FORM)
