"""`tmoe.grouped_gemm` on every backend: empty experts, rows past the end, any strides."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.layouts import STRIDED
from tests.reference import grouped_gemm_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    with tmoe.options(backend=request.param):
        yield request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "sizes, tail, why",
    [
        ((3, 0, 5, 0), 0, "empty-experts (PD08)"),
        ((2, 3), 3, "rows-past-the-end (PD01)"),
        ((6,), 2, "one-expert-and-a-tail (PD07)"),
        ((0, 0, 0), 0, "all-empty (EM06)"),
        ((4, 0), 0, "last-empty (EM06)"),
        ((0, 4), 0, "first-empty (EM06)"),
        ((1, 8, 17), 0, "uneven (EM09)"),
        ((3, 0, 9), 4, "padding-rows (PD09)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_grouped_gemm(sizes, tail, why, bias, dtype, backend, device):
    a = torch.randn(sum(sizes) + tail, 24).to(device, dtype)
    b = torch.randn(len(sizes), 20, 24).to(device, dtype)
    bias = torch.randn(len(sizes), 20).to(device, dtype) if bias else None
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)
    truth = grouped_gemm_ref(a, b, offsets, bias=bias)
    naive = grouped_gemm_ref(a, b, offsets, bias=bias, dtype=dtype)
    a[sum(sizes) :] = NAN
    got = tmoe.grouped_gemm(a, b, offsets, bias=bias)
    assert_matches(got, truth, naive)
    assert (got[sum(sizes) :] == 0).all()
    out = torch.full_like(got, NAN)
    assert tmoe.grouped_gemm(a, b, offsets, bias=bias, out=out) is out and torch.equal(out, got)


@pytest.mark.parametrize("how", STRIDED)
def test_grouped_gemm_of_any_strides(how, backend, device):
    a, b = torch.randn(9, 24, device=device), torch.randn(3, 20, 24, device=device)
    offsets = torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=device)
    want = tmoe.grouped_gemm(a, b, offsets)
    torch.testing.assert_close(tmoe.grouped_gemm(STRIDED[how](a), STRIDED[how](b), offsets), want)
