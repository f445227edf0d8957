"""Used tokens: which tokens have a row at all.

    index[t] = t if slot_to_row[t, k] >= 0 for some k, else -1

A scale that all rows share must not see a token whose experts are all elsewhere. T tokens, K
experts per token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options

BLOCK_T = 128


@triton.jit(do_not_specialize=["T"])
def _used_tokens_kernel(
    index_ptr,  # (T,) int32  written
    slot_to_row_ptr,  # (T, K) int32; -1 = not local
    T, K, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(T, BLOCK_T),)."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)[None, :]
    ptrs = slot_to_row_ptr + t[:, None].to(tl.int64) * K + k
    rows = tl.load(ptrs, mask=(t < T)[:, None] & (k < K), other=-1)
    tl.store(index_ptr + t, tl.where(tl.max(rows, 1) >= 0, t, -1), mask=t < T)


def used_tokens(slot_to_row: Tensor) -> Tensor:
    """slot_to_row (T, K), contiguous -> index (T,) int32."""
    T, K = slot_to_row.shape
    index = slot_to_row.new_empty(T)
    if T:
        launch(
            _used_tokens_kernel, (cdiv(T, BLOCK_T),),
            index, slot_to_row, T, K,
            BLOCK_T=BLOCK_T, BLOCK_K=next_power_of_2(K), **pdl_options(index.device),
        )  # fmt: skip
    return index
