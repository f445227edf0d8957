"""`tmoe.grouped_gemm` on every backend: empty experts, rows past the end, any strides."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.layouts import STRIDED
from tests.reference import grouped_gemm_ref, quantized
from tmoe.formats import SCHEMES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_weights(scheme, dtype, backend, device):
    """Rows past the end may hold anything and share no scale; any strides of a."""
    scheme, sizes, tail = SCHEMES[scheme], (3, 0, 9), 4
    S = sum(sizes)
    a = torch.randn(S + tail, 320, device=device).to(dtype)[:, ::2]
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0).int()
    bias = torch.randn(3, 40, device=device).to(dtype)
    for recipe in scheme.weights:
        b = quantized(torch.randn(3, 40, 160, device=device), recipe)
        a[S:] = 0
        rows = a.float() if scheme.inputs is None else quantized(a, scheme.inputs).dequantize()
        truth = grouped_gemm_ref(rows, b.dequantize(), offsets, bias=bias)
        naive = grouped_gemm_ref(
            a.bfloat16(), b.dequantize(torch.bfloat16), offsets, bias=bias, dtype=torch.bfloat16
        )
        a[S:] = NAN
        got = tmoe.grouped_gemm(a, b, offsets, bias=bias, scheme=scheme.name)
        assert got.dtype == dtype and (got[S:] == 0).all()
        assert_matches(got, truth, naive)
        out = torch.full_like(got, NAN)
        tmoe.grouped_gemm(a, b, offsets, bias=bias, scheme=scheme.name, out=out)
        assert torch.equal(out, got)
        assert a[S:].isnan().all()  # the caller's, as it was


@pytest.mark.parametrize("scheme", ["fp8_tensor", "nvfp4"])
def test_a_static_scale_for_each_expert(scheme, backend, device):
    inputs, (recipe,) = SCHEMES[scheme].inputs, SCHEMES[scheme].weights
    a, b = torch.randn(9, 64, device=device), torch.randn(3, 16, 64, device=device)
    b, offsets = quantized(b, recipe), torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=device)
    scale = torch.tensor([0.03, 7.0, 0.005], device=device)
    got = tmoe.grouped_gemm(a, b, offsets, scheme=scheme, a_scale=scale)
    name = "global_scale" if scheme == "nvfp4" else "scale"
    for e, rows in ((0, slice(0, 4)), (2, slice(4, 9))):
        values = quantized(a[rows], inputs, **{name: scale[e]}).dequantize()
        want = values.double() @ b[e].dequantize().double().T
        torch.testing.assert_close(got[rows].double(), want, rtol=1e-5, atol=1e-6)


def test_what_a_quantised_weight_needs():
    a, offsets = torch.randn(4, 64), torch.tensor([0, 4], dtype=torch.int32)
    b = tmoe.quantize(torch.randn(1, 16, 64), "fp8_channel")

    def refused(match, a=a, b=b, error=ValueError, **given):
        with pytest.raises(error, match=match):
            tmoe.grouped_gemm(a, b, offsets, **given)

    refused("scheme must be named .* one of fp8_channel, fp8_a16, got None")
    refused("b must be mxfp4 .* for mxfp4_a16, got fp8_channel", scheme="mxfp4_a16")
    refused("a_scale must be None for fp8_channel", scheme="fp8_channel", a_scale=torch.ones(1))
    refused("a_scale must be None where b isn't", b=b.dequantize(), a_scale=torch.ones(1))
    refused("fp8_channel takes weights from tmoe.quantize", b=b.dequantize(), scheme="fp8_channel")
    refused("a must have dtype", a=a.double(), scheme="fp8_channel", error=TypeError)
    refused("a must be of shape", a=a[:, :32], scheme="fp8_channel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_through_quantised_weights(scheme, dtype, backend, device):
    """Straight through the rounding of a; of a and bias, or of one alone; dy may be expanded, and
    what stands past the end touches nothing."""
    sizes, tail = (3, 0, 9), 4
    S = sum(sizes)
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0).int()
    a = torch.randn(S + tail, 320, device=device).to(dtype)[:, ::2]
    bias = torch.randn(3, 40, device=device).to(dtype)
    dy = torch.randn(S + tail, 40, device=device).to(dtype)
    for recipe in SCHEMES[scheme].weights:
        b = quantized(torch.randn(3, 40, 160, device=device), recipe)
        numbers = b.dequantize()

        def gradients(dy, run, dtype, leaves=(a, bias)):
            leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
            return torch.autograd.grad(run(*leaves), leaves, dy.to(dtype))

        def plain(dtype):
            def run(a, bias):
                return grouped_gemm_ref(a, numbers.to(dtype), offsets, bias=bias, dtype=dtype)  # noqa: B023

            return run

        def ours(a, bias=bias):
            return tmoe.grouped_gemm(a, b, offsets, bias=bias, scheme=scheme)  # noqa: B023

        dy[S:] = 0
        truth = gradients(dy, plain(torch.float64), torch.float64)
        naive = gradients(dy, plain(torch.bfloat16), torch.bfloat16)
        a[S:] = dy[S:] = NAN
        got = gradients(dy, ours, dtype)
        for mine, *others in zip(got, truth, naive, strict=True):
            assert mine.dtype == dtype
            assert_matches(mine, *others)
        assert (got[0][S:] == 0).all() and (got[1][1] == 0).all()
        assert torch.equal(gradients(dy, ours, dtype, (a,))[0], got[0])
        one = dy[:1].expand_as(dy)
        (expanded,) = gradients(one, ours, dtype, (a,))
        assert torch.equal(expanded, gradients(one.contiguous(), ours, dtype, (a,))[0])


def test_gradients_through_no_rows_of_quantised_weights(backend, device):
    b = tmoe.quantize(torch.randn(2, 16, 64, device=device), "nvfp4")
    a = torch.zeros(0, 64, device=device, requires_grad=True)
    bias = torch.randn(2, 16, device=device, requires_grad=True)
    offsets = torch.zeros(3, dtype=torch.int32, device=device)
    tmoe.grouped_gemm(a, b, offsets, bias=bias, scheme="nvfp4").sum().backward()
    assert a.grad.shape == (0, 64) and (bias.grad == 0).all()


def test_quantised_weights_compile(backend, device):
    a, offsets = torch.randn(4, 64, device=device), torch.tensor([0, 4], dtype=torch.int32)
    b, offsets = tmoe.quantize(torch.randn(1, 16, 64, device=device), "nvfp4"), offsets.to(device)

    def multiply(a):
        return tmoe.grouped_gemm(a, b, offsets, scheme="nvfp4")

    torch._dynamo.reset()  # a backward that is compiled keeps the backend that it was traced with
    compiled = torch.compile(multiply, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a), multiply(a))
    a.requires_grad_()
    want, got = (torch.autograd.grad(run(a).sum(), a)[0] for run in (multiply, compiled))
    assert torch.equal(got, want)
