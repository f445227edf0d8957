"""The casts on every bf16 number and around it: the same bits as torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tmoe.kernels.casts import narrow, widen

BLOCK = 4096


@triton.jit
def _narrow_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, narrow(tl.load(x_ptr + offs), out_ptr.dtype.element_ty))


@triton.jit
def _widen_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, widen(tl.load(x_ptr + offs)).to(tl.float32))


def same_numbers(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit, -0 included; any NaN is as good as another."""
    kind = {2: torch.int16, 4: torch.int32}[want.element_size()]
    nan = want.isnan()
    bits = torch.equal(got.view(kind)[~nan], want.view(kind)[~nan])
    return bits and torch.equal(got.isnan(), nan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], ids=hex)
def test_narrow(low, dtype, device):
    """All 65536 upper halves of an fp32 number, with lower halves on both sides of a tie."""
    bits = (torch.arange(2**16, dtype=torch.int64) << 16) + low
    x = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32).to(device)
    out = torch.empty(2**16, dtype=dtype, device=device)
    _narrow_kernel[(2**16 // BLOCK,)](out, x, BLOCK=BLOCK)
    assert same_numbers(out, x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_widen(dtype, device):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    out = torch.empty(2**16, dtype=torch.float32, device=device)
    _widen_kernel[(2**16 // BLOCK,)](out, x, BLOCK=BLOCK)
    assert same_numbers(out, x.float())
