"""Tensors of more than 2^31 elements, at the sizes where others failed."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.gpu.layers import Model, check_tokens, inputs, run, sample
from tmoe.kernels.combine import combine
from tmoe.shapes import MoEShape

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
GIGABYTE = 10**9


@pytest.fixture(autouse=True)
def room():
    """Each of these needs up to 40 GB."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 45 * GIGABYTE:
        pytest.skip("needs 45 GB of GPU memory")
    yield
    torch.cuda.empty_cache()


CASES = {
    "OV01 intermediate": (MoEShape("", 8, 2, 1024, 28672), 70_000),
    "OV02 rows": (MoEShape("", 16, 6, 4096, 512), 100_000),
    "OV04 experts": (MoEShape("", 512, 8, 4096, 1024), 64),
    "OV05 input": (MoEShape("", 8, 1, 2048, 2048), 1_079_839),
}


@pytest.mark.parametrize("case", CASES)
def test_fused_experts(case, device):
    shape, T = CASES[case]
    model = Model(shape)
    tensors = inputs(model, T, device, BF16) | model.weights(device, BF16)
    # The first and the last expert for the tokens at both ends.
    for t in (0, T - 1):
        tensors["topk_ids"][t, 0] = 0
        tensors["topk_ids"][t, 1:] = shape.num_experts - torch.arange(1, shape.top_k)
    tensors["topk_ids"][T - 1, 0] = shape.num_experts // 2
    y = run(tensors, model.keywords)
    assert y.sum(1).isfinite().all(), "some rows were never written"
    check_tokens(y, sorted({*sample(T), 37_449 % T}), tensors, model.keywords)


def test_grouped_gemm(device):
    S, N, D, E = 140_000, 28_672, 64, 8
    a = torch.randn(S, D, device=device).to(BF16)
    b = torch.randn(E, N, D, device=device).to(BF16) / 8
    bounds = torch.linspace(0, S - 7, E + 1).int().to(device)
    with tmoe.options(backend="triton"):
        y = tmoe.grouped_gemm(a, b, bounds)
    assert (y[S - 7 :] == 0).all()
    for row in [*sample(S - 7), 37_449]:
        expert = int((bounds[1:] <= row).sum())
        exact = a[row].double() @ b[expert].double().T
        assert_matches(y[row], exact, a[row] @ b[expert].T)


def test_combine_past_the_rows_that_32_bits_count(device):
    T, K, H = 100_000, 6, 4096
    rows = torch.zeros(T * K, H, dtype=BF16, device=device).normal_()
    slots = torch.randperm(T * K, device=device).view(T, K).int()
    y = combine(rows, slots, rows.new_empty(T, H))
    tokens = [*sample(T), int((slots == T * K - 1).nonzero()[0, 0])]
    want = rows[slots[tokens].long()].float().sum(1)
    torch.testing.assert_close(y[tokens], want.to(BF16))
