"""What a `QuantizedTensor` does as a tensor: slices by expert, comparison, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tmoe import quantize
from tmoe.formats import FORMATS, QuantizedTensor

E, M, K = 4, 8, 64


def experts(format="nvfp4"):
    return quantize(torch.randn(E, M, K, dtype=torch.bfloat16), format)


@pytest.fixture(params=FORMATS)
def q(request):
    return experts(request.param)


def equal_bytes(x, y):
    as_bytes = [part.contiguous().reshape(-1).view(torch.uint8) for part in (x, y)]
    return x.shape == y.shape and torch.equal(*as_bytes)


@pytest.mark.parametrize(
    "pick",
    [
        lambda t: t[2],
        lambda t: t[-1],
        lambda t: t[1:3],
        lambda t: t[::2],
        lambda t: t[[0, 2]],
        lambda t: t[torch.tensor([3, 3, 0])],
        lambda t: t[torch.tensor([True, False, True, False])],
        lambda t: t.narrow(0, 1, 2),
        lambda t: t.index_select(0, torch.tensor([1, 0])),
        lambda t: t.unbind(0)[1],
        lambda t: list(t)[3],
        lambda t: t.split(3)[1],
        lambda t: t.chunk(2)[1],
        lambda t: t[0:0],
        lambda t: t[1:3][1],
    ],
)
def test_slices_by_expert(q, pick):
    got = pick(q)
    assert isinstance(got, QuantizedTensor)
    for mine, whole in zip(got.parts(), q.parts(), strict=True):
        assert equal_bytes(mine, pick(whole))
    assert torch.equal(got.dequantize(), pick(q.dequantize()))
    assert got.shape == pick(torch.empty(E, M, K)).shape


def test_both_global_scales_of_an_expert_are_sliced_along():
    q = quantize(torch.randn(E, M, K), "nvfp4", global_scale=torch.rand(E, 2) + 0.1)
    assert torch.equal(q[[2, 1]].global_scale, q.global_scale[[2, 1]])
    assert torch.equal(q[2].dequantize(), q.dequantize()[2])


def test_equal_compares_format_and_bytes(q):
    assert torch.equal(q, q.clone())
    other = q.clone()
    other.data.view(torch.uint8)[0, 0, 0] ^= 1
    assert not torch.equal(q, other)
    assert not torch.equal(q, q[:2])
    assert not torch.equal(q, experts("mxfp8" if q.format != "mxfp8" else "mxfp4"))


REFUSED = {
    "aten.add.Tensor": lambda q: q + 1,
    "aten.add.Tensor from the right": lambda q: torch.randn(E, M, K) + q,
    "aten.bmm": lambda q: torch.bmm(torch.randn(E, 1, M), q),
    "aten.t": lambda q: nn.functional.linear(torch.randn(1, K), q[0]),
    "aten.sum": lambda q: q.sum(),
    "aten.eq": lambda q: q == q,
    "aten.transpose": lambda q: q.mT,
    "aten.view": lambda q: q.view(-1),
    "aten.select": lambda q: q[:, 0],
    "aten.select of a matrix": lambda q: q[0][0],
    "aten.slice": lambda q: q[:, ::2],
    "aten.index": lambda q: q[:, [0, 1]],
    "aten.index of pairs": lambda q: q[[0, 1], [0, 1]],
    "aten.unbind": lambda q: q.unbind(1),
    "aten.cat": lambda q: torch.cat([q, q], 2),
    "aten.cat with another": lambda q: torch.cat([q, torch.randn(E, M, K)]),
    "aten.stack": lambda q: torch.stack([q, q], 1),
    "aten.zero_": lambda q: q.zero_(),
    "aten.normal_": lambda q: nn.init.normal_(q),
    "aten.copy_": lambda q: q.copy_(torch.randn(E, M, K)),
    "aten.copy_ the other way": lambda q: torch.randn(E, M, K).copy_(q),
    "aten._to_copy": lambda q: q.to(torch.int8),
    "data_ptr": lambda q: q.data_ptr(),
    "__dlpack__": lambda q: q.__dlpack__(),
}


@pytest.mark.parametrize("op", REFUSED)
def test_everything_else_is_refused_by_name(op):
    with pytest.raises(NotImplementedError, match=r"call \.dequantize\(\)") as error:
        REFUSED[op](experts())
    assert op.split()[0] in str(error.value)
