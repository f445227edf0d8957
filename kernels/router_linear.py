"""Router linear: logits = x · weightᵀ (+ bias) for few tokens, in parts that `route` adds up.

    parts[p] = x[:, chunk p of H] · weight[:, chunk p of H]ᵀ          (P, T, E) fp32
    logits   = Σ_p parts[p], rounded to the router's dtype

A matmul library is made for large matrices: with a token or a few it starts a handful of programs
and reads the weight with a fraction of the bandwidth. Here H is cut into chunks, so that the whole
GPU reads; and `route`, launched right behind, adds the parts up when it loads its logits, in one
order. The chunks don't depend on T, nor does the order of any sum: a token has the same logits in
any batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.casts import narrow, widen
from tmoe.kernels.launch import cdiv, fp32_precision, launch, pdl_options

BLOCK_T = 16  # the narrowest that tensor cores multiply


@triton.jit(do_not_specialize=["T"])
def _router_linear_kernel(
    parts_ptr,  # (P, T, E) fp32, written
    x_ptr,  # (T, H)
    weight_ptr,  # (E, H)
    bias_ptr,  # (E,) or None
    T, stride_xt, stride_we,
    E: tl.constexpr, H: tl.constexpr, CHUNK: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (P, cdiv(E, BLOCK_E), cdiv(T, BLOCK_T))."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    token = (tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    columns = part * CHUNK + tl.arange(0, BLOCK_H)
    x_ptrs = x_ptr + token[None, :] * stride_xt + columns[:, None]
    weight_ptrs = weight_ptr + expert.to(tl.int64)[:, None] * stride_we + columns[None, :]
    logits = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    for start in range(0, CHUNK, BLOCK_H):
        left = columns + start < H
        mask = (expert < E)[:, None] & left[None, :]
        weight = widen(tl.load(weight_ptrs + start, mask=mask, other=0.0))
        mask = left[:, None] & (token < T)[None, :]
        x = widen(tl.load(x_ptrs + start, mask=mask, other=0.0))
        if SPLIT:
            # An fp32 number is the sum of three bf16 numbers, so the products are those of fp32,
            # from tensor cores. Small ones first; and every step by itself, since tensor cores
            # cut digits off a long sum. (An fma: a plain addition would be merged into the dot.)
            high = widen(narrow(weight, tl.bfloat16))
            rest = weight - high.to(tl.float32)
            middle = widen(narrow(rest, tl.bfloat16))
            low = widen(narrow(rest - middle.to(tl.float32), tl.bfloat16))
            step = tl.dot(high, x, tl.dot(middle, x, tl.dot(low, x)))
            logits = tl.fma(step, 1.0, logits)
        elif weight.dtype == tl.float32:
            logits = tl.fma(tl.dot(weight, x, input_precision=PRECISION), 1.0, logits)
        else:
            logits = tl.dot(weight, x, logits)
    if bias_ptr is not None:
        bias = widen(tl.load(bias_ptr + expert, mask=expert < E, other=0.0)).to(tl.float32)
        logits += tl.where(part == 0, bias, 0.0)[:, None]
    ptrs = parts_ptr + (part * T + token[None, :]) * E + expert[:, None]
    tl.store(ptrs, logits, mask=(expert < E)[:, None] & (token < T)[None, :])


def router_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, H), weight (E, H), both with rows in one piece, bias (E,) -> parts (P, T, E) fp32.

    The dtypes are fp32, fp16 or bf16; the product is taken in the weight's.
    """
    (T, H), E = x.shape, weight.shape[0]
    split = weight.dtype == torch.float32 and x.dtype == torch.bfloat16
    if not split:
        x = x.to(weight.dtype)
    # Enough programs to read from everywhere, not so many parts that adding them up takes longer.
    # Measured on an H200 with T = 1, 16, 64 and the routers of five models.
    block_e, block_h = 32 if split or E >= 160 else 16, 64 if split else 128
    chunk = cdiv(cdiv(H, 8 if 64 <= E < 160 and not split else 16), block_h) * block_h
    num_parts = cdiv(H, chunk)
    parts = torch.empty((num_parts, T, E), dtype=torch.float32, device=x.device)
    if T > 0:
        launch(
            _router_linear_kernel, (num_parts, cdiv(E, block_e), cdiv(T, BLOCK_T)),
            parts, x, weight, bias, T, x.stride(0), weight.stride(0),
            E=E, H=H, CHUNK=chunk, SPLIT=split, PRECISION=fp32_precision(),
            BLOCK_T=BLOCK_T, BLOCK_E=block_e, BLOCK_H=block_h,
            num_warps=4, **pdl_options(x.device),
        )  # fmt: skip
    return parts


def router_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The logits (T, E) in the dtype of `weight`."""
    return F.linear(x.to(weight.dtype), weight, bias)
