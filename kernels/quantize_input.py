"""What the quantisers read: rows of x, or of x gathered, or an activation of x, in fp32.

    row r comes from  x[r]    or  x[index[r] // top_k], times a weight       (`Rows`)
    and is            itself  or  act(gate, up), x = [gate | up], not rounded in between

Leading dimensions (experts) are matrices of their own: x is (L, M, K) here, L at most 65535. The
fused forms exist so that neither permuted nor activated rows are ever written in bf16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.activation import activate, activate_gated
from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options
from tmoe.kernels.quantize_ref import GATED_ACTIVATIONS, Rows
from tmoe.kernels.rounding import amax, larger

TILE = 4096  # elements of a program of 4 warps
MOST_PARTIALS = tl.constexpr(512)  # programs that look for one maximum


@triton.jit
def _load_fp32(ptrs, mask):
    x = tl.load(ptrs, mask=mask, other=0.0)
    if x.dtype == tl.bfloat16:  # by hand: exact in the interpreter, and one instruction on a GPU
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def load(
    x_ptr,  # one matrix (num_rows, K), or (num_rows, 2K) for a gated activation
    pick,  # the pointers and top_k of `Rows`
    rows, cols,  # [n, 1] and [n or 1, m], of the result
    M, K, num_rows, stride_m, stride_k, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """[n, m] in fp32, 0 outside the matrix."""
    index_ptr, weight_ptr, count_ptr, top_k = pick
    inside = rows < M
    if count_ptr is not None:
        inside &= rows < tl.load(count_ptr)
    if index_ptr is not None:
        index = tl.load(index_ptr + rows, mask=inside, other=-1)
        rows = index // top_k
        inside = (index >= 0) & (rows < num_rows)
    mask = inside & (cols < K)
    row_ptrs = x_ptr + rows.to(tl.int64) * stride_m
    x = _load_fp32(row_ptrs + cols.to(tl.int64) * stride_k, mask)
    if weight_ptr is not None:
        x *= _load_fp32(weight_ptr + index, inside)
    if GATED:
        up = _load_fp32(row_ptrs + (cols + K).to(tl.int64) * stride_k, mask)
        return activate_gated(x, up, alpha, limit, ACTIVATION)
    elif ACTIVATION is not None:
        return activate(x, ACTIVATION)
    else:
        return x


@triton.jit
def _side_by_side(a, b):
    """[n, m] and [n, m] → [n, 2m], within each thread."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def load_32(
    x_ptr, pick,
    rows, stretches,  # [n]: which row, and which stretch of 32 consecutive columns
    M, K, num_rows, stride_m, stride_k, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """[n, 32] as of `load`, but loaded so that a thread holds whole stretches: the maximum of a
    block then needs no other thread, and its scale is worked out once."""
    rows = rows[:, None]
    cols = stretches[:, None] * 32 + tl.arange(0, 8)[None, :]  # 16 bytes of bf16
    x0 = load(
        x_ptr, pick, rows, cols, M, K, num_rows, stride_m, stride_k, alpha, limit,
        ACTIVATION, GATED,
    )  # fmt: skip
    x1 = load(
        x_ptr, pick, rows, cols + 8, M, K, num_rows, stride_m, stride_k, alpha, limit,
        ACTIVATION, GATED,
    )  # fmt: skip
    x2 = load(
        x_ptr, pick, rows, cols + 16, M, K, num_rows, stride_m, stride_k, alpha, limit,
        ACTIVATION, GATED,
    )  # fmt: skip
    x3 = load(
        x_ptr, pick, rows, cols + 24, M, K, num_rows, stride_m, stride_k, alpha, limit,
        ACTIVATION, GATED,
    )  # fmt: skip
    return _side_by_side(_side_by_side(x0, x1), _side_by_side(x2, x3))


@triton.jit(do_not_specialize=["M", "num_rows"])
def _partial_amax_kernel(
    partial_ptr,  # (L, P) fp32, written
    x_ptr, pick,
    M, K, num_rows, stride_l, stride_m, stride_k, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, COL_TILES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (P, L). The P programs share a matrix's tiles, ROWS × COLS each."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    matrix = tl.program_id(1).to(tl.int64)
    largest = tl.zeros((ROWS, COLS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, ROWS) * COL_TILES, tl.num_programs(0)):
        rows = tile // COL_TILES * ROWS + tl.arange(0, ROWS)[:, None]
        cols = tile % COL_TILES * COLS + tl.arange(0, COLS)[None, :]
        x = load(
            x_ptr + matrix * stride_l, pick, rows, cols,
            M, K, num_rows, stride_m, stride_k, alpha, limit, ACTIVATION, GATED,
        )  # fmt: skip
        largest = larger(largest, tl.abs(x))
    partial_ptr += matrix * tl.num_programs(0) + tl.program_id(0)
    tl.store(partial_ptr, amax(largest, None, keep_dims=False))


@triton.jit
def amax_of_partials(partial_ptr, matrix, num_partials):
    """max |x| of one matrix, a scalar, from what `partial_amax` left."""
    offs = tl.arange(0, MOST_PARTIALS)
    ptrs = partial_ptr + matrix * num_partials + offs
    return amax(tl.load(ptrs, mask=offs < num_partials, other=0.0), 0, keep_dims=False)


@dataclass(frozen=True, slots=True)
class Source:
    """What a launcher was given, as its kernel takes it."""

    x: Tensor  # (L, num_rows, K), or (L, num_rows, 2K) for a gated activation
    rows: Rows
    activation: str | None
    alpha: float
    limit: float
    shape: tuple[int, ...]  # (..., M, K), of the result

    @classmethod
    def of(cls, x: Tensor, rows: Rows, activation: tuple[str, float, float] | None) -> Source:
        name, alpha, limit = activation or (None, 1.0, math.inf)
        columns = x.shape[-1] // 2 if name in GATED_ACTIVATIONS else x.shape[-1]
        num_rows = x.shape[-2] if rows.index is None else rows.index.numel()
        matrices = x[None] if x.dim() == 2 else x.flatten(0, -3)
        return cls(matrices, rows, name, alpha, limit, (*x.shape[:-2], num_rows, columns))

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of "one per matrix"."""
        return self.shape[:-2]

    @property
    def L(self) -> int:
        return self.x.shape[0]

    @property
    def M(self) -> int:
        return self.shape[-2]

    @property
    def K(self) -> int:
        return self.shape[-1]

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    @property
    def pick(self) -> tuple:
        """What `load` picks the rows with."""
        return (self.rows.index, self.rows.weight, self.rows.count, self.rows.top_k)

    @property
    def arguments(self) -> tuple:
        """M to limit, in the kernels' order."""
        return (self.M, self.K, self.x.shape[1], *self.x.stride(), self.alpha, self.limit)

    @property
    def constants(self) -> dict[str, object]:
        gated = self.activation in GATED_ACTIVATIONS
        return {"ACTIVATION": self.activation, "GATED": gated, **pdl_options(self.x.device)}


def tile_width(n: int, most: int) -> int:
    """The largest power of two, at most `most`, whose tiles waste no more than a ninth of their
    columns on the n that there are; 16 if all do."""
    width = min(most, next_power_of_2(n))
    while width > 16 and cdiv(n, width) * width * 8 > n * 9:
        width //= 2
    return width


def partial_amax(source: Source) -> Tensor:
    """(L, P) fp32, of which each row's maximum is max |x| of a matrix. Atomics would want zeroed
    memory, hence one more launch; to read a few hundred numbers costs the next kernel less."""
    cols = tile_width(source.K, 1024)
    rows = 2 * TILE // cols
    col_tiles = cdiv(source.K, cols)
    programs = min(max(1, MOST_PARTIALS.value // source.L), cdiv(source.M, rows) * col_tiles)
    partial = source.x.new_empty((source.L, programs), dtype=torch.float32)
    launch(
        _partial_amax_kernel, (programs, source.L),
        partial, source.x, source.pick, *source.arguments,
        ROWS=rows, COLS=cols, COL_TILES=col_tiles, num_warps=8, **source.constants,
    )  # fmt: skip
    return partial
