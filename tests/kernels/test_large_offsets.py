"""Rows and experts that start past 2^31 elements, on any machine: memory that nobody touches is
free.

A tensor of three rows gets a row stride of 2^30 and more: its last row starts past 2^31, which 32
bits take for -2^31. The buffer reaches that far back, so an offset that wraps gives a wrong number
here, not a crash.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tmoe.kernels.clear_tail import clear_tail
from tmoe.kernels.combine import combine, combine_ref
from tmoe.kernels.grouped_gemm import grouped_gemm, grouped_gemm_ref
from tmoe.kernels.sort import tile_rows
from tmoe.kernels.tiles import Tile

FAR = 2**30 + 8  # a multiple of 16 bytes
TILE = Tile(16, 16, 16, 4, 2)


@pytest.fixture(scope="module")
def buffer():
    """Addresses for 2^32 + 2^12 numbers of 16 bits; int8 because conftest fills floats."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(2 * (2**32 + 2**12), dtype=torch.int8, device=device).view(torch.float16)


def spread(buffer: Tensor, x: Tensor, stride: int = FAR) -> Tensor:
    """x with `stride` from one entry of its first dimension to the next."""
    view = buffer.as_strided(x.shape, (stride, *x.stride()[1:]), 2**31)
    return view.copy_(x)


def randn(device, *shape: int) -> Tensor:
    return torch.randn(shape).half().to(device)


def test_combine(buffer, device):
    """OV01, OV02"""
    rows = randn(device, 3, 24)
    slots = torch.tensor([[0, 2], [2, -1], [1, 0]], dtype=torch.int32, device=device)
    want = combine(rows, slots, torch.empty(3, 24, dtype=torch.float16, device=device))
    torch.testing.assert_close(want, combine_ref(rows.float(), slots).half())
    assert torch.equal(combine(spread(buffer, rows), slots, torch.empty_like(want)), want)
    out = spread(buffer, torch.zeros_like(want))
    assert torch.equal(combine(rows, slots, out), want)


def test_clear_tail(buffer, device):
    out = spread(buffer, torch.ones(3, 24, dtype=torch.float16, device=device))
    clear_tail(out, torch.tensor([0, 2], dtype=torch.int32, device=device))
    assert out.sum(1).tolist() == [24, 24, 0]


@pytest.mark.parametrize("which", ["a", "w", "bias", "out"])
@pytest.mark.parametrize("stride", [FAR, FAR + 1], ids=["descriptor", "pointers"])
def test_grouped_gemm(which, stride, buffer, device):
    """OV04: three experts of one row each."""
    offsets = torch.arange(4, dtype=torch.int32, device=device)
    order = tile_rows(offsets, 3, block_m=16)
    tensors = {
        "a": randn(device, 3, 16), "w": randn(device, 3, 24, 16), "bias": randn(device, 3, 24)
    }  # fmt: skip
    out = torch.zeros(3, 24, dtype=torch.float16, device=device)
    want = grouped_gemm_ref(tensors["a"].float(), tensors["w"], offsets, bias=tensors["bias"])
    tensors["out"] = out
    tensors[which] = spread(buffer, tensors[which], stride)
    grouped_gemm(tensors["out"], tensors["a"], tensors["w"], order, TILE, bias=tensors["bias"])
    torch.testing.assert_close(tensors["out"].float(), want, rtol=1e-2, atol=1e-2)
