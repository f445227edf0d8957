"""Clear tail: zero the rows that belong to no expert.

    out[r, n] = 0        r >= expert_offsets[E]

A grouped GEMM over sorted rows writes the experts' rows only; what stands behind them was never
written. The number of such rows is known on the device alone, so every program looks at the offset
and most have nothing to do. S rows, N columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.launch import cdiv, launch, pdl_options


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def _clear_tail_kernel(
    out_ptr,  # (S, N)  rows [expert_offsets[E], S) are written
    expert_offsets_ptr,  # (E+1,)
    num_rows, num_experts, N, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (P,). The programs share the rows."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    first = tl.load(expert_offsets_ptr + num_experts) + tl.program_id(0) * BLOCK_M
    for block in range(first, num_rows, tl.num_programs(0) * BLOCK_M):
        rows = block + tl.arange(0, BLOCK_M)
        for n in range(0, N, BLOCK_N):
            offs_n = n + tl.arange(0, BLOCK_N)
            out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + offs_n[None, :]
            zeros = tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty)
            tl.store(out_ptrs, zeros, mask=(rows < num_rows)[:, None] & (offs_n < N)[None, :])
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def clear_tail(out: Tensor, expert_offsets: Tensor) -> Tensor:
    """Zero the rows of `out` (S, N), unit column stride, from expert_offsets[E] on; return it."""
    S, N = out.shape
    if out.numel():
        launch(
            _clear_tail_kernel, (min(cdiv(S, 16), 256),),
            out, expert_offsets, S, expert_offsets.numel() - 1, N, out.stride(0),
            BLOCK_M=16, BLOCK_N=128, **pdl_options(out.device),
        )  # fmt: skip
    return out


def clear_tail_ref(out: Tensor, expert_offsets: Tensor) -> Tensor:
    """The same in torch, out of place."""
    cleared = out.clone()
    cleared[int(expert_offsets[-1]) :] = 0
    return cleared
