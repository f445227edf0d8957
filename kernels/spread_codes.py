"""Spread codes: rows that were quantised before they came, in the order of their experts.

    row = slot_to_row[t, k] >= 0:   out[row] = codes[t],  out_scale[row] = scale[t]

Tiles with specialised warps want their rows beside each other. `quantize_fp8` writes them so; this
does it for rows that are codes already, with the scales of a column of blocks together. A token is
read once. T tokens, K experts per token, S = T·K rows, W words of codes, C blocks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options


@triton.jit
def _spread_codes_kernel(
    out_ptr,  # (S, W)  written, in rows that slot_to_row names
    out_scale_ptr,  # (S, C) fp32, a column's together  written
    codes_ptr,  # (T, W)
    scale_ptr,  # (T, C) fp32
    slot_to_row_ptr,  # (T, K) int32; -1 = not local
    W, C, K, stride_codes, stride_scale_t, stride_scale_c, stride_out_c,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T, cdiv(W, BLOCK_W)); the first program of a token writes its scales."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    t, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    words, c = j * BLOCK_W + tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_C).to(tl.int64)
    codes = tl.load(codes_ptr + t * stride_codes + words, mask=words < W, other=0)
    scale_ptrs = scale_ptr + t * stride_scale_t + c * stride_scale_c
    scale = tl.load(scale_ptrs, mask=(c < C) & (j == 0), other=0.0)
    for k in range(K):
        row = tl.load(slot_to_row_ptr + t * K + k).to(tl.int64)
        tl.store(out_ptr + row * W + words, codes, mask=(row >= 0) & (words < W))
        ptrs = out_scale_ptr + c * stride_out_c + row
        tl.store(ptrs, scale, mask=(row >= 0) & (c < C) & (j == 0))
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def spread_codes(codes: Tensor, scale: Tensor, slot_to_row: Tensor) -> tuple[Tensor, Tensor]:
    """codes (T, D) float8_e4m3fn with dense columns, scale (T, C) fp32, slot_to_row (T, K)
    contiguous -> (S, D) and (S, C), which isn't contiguous: its transpose is."""
    (T, K), D, C = slot_to_row.shape, codes.shape[1], scale.shape[1]
    out = torch.empty(T * K, D, dtype=torch.uint8, device=codes.device)
    out_scale = scale.new_empty(C, T * K).T
    if T > 0:
        aligned = all(n % 4 == 0 for n in (D, codes.stride(0), codes.storage_offset()))
        word = torch.int32 if aligned else torch.uint8
        to, words = out.view(word), codes.view(word)
        W = words.shape[1]
        block_w = min(1024, max(16, next_power_of_2(W)))
        launch(
            _spread_codes_kernel, (T, cdiv(W, block_w)),
            to, out_scale, words, scale, slot_to_row, W, C, K,
            words.stride(0), *scale.stride(), out_scale.stride(1),
            BLOCK_W=block_w, BLOCK_C=next_power_of_2(C), **pdl_options(codes.device),
        )  # fmt: skip
    return out.view(torch.float8_e4m3fn), out_scale


def spread_codes_ref(
    codes: Tensor, scale: Tensor, slot_to_row: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that are written, and what they hold, in torch."""
    local = slot_to_row >= 0
    token = local.nonzero()[:, 0]
    return slot_to_row[local].long(), codes.view(torch.uint8)[token], scale[token]
