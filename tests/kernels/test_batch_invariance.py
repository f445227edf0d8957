"""The same bits for a token whatever stands beside it, and in every run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tmoe
import tmoe.kernels.tiles as tiles_module
from tmoe.kernels.tiles import FLOAT32

E, K, H, I = 4, 2, 48, 40
BATCHES = (1, 2, 8, 33, 128)


@pytest.fixture(autouse=True)
def like_a_gpu(device, monkeypatch):
    """Under the interpreter: tiles that grow with the batch, and a dot that rounds a row the same
    wherever it stands in its tile, which BLAS doesn't."""
    if device.type == "cpu":
        monkeypatch.setattr(tiles_module, "INTERPRETER", FLOAT32)
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b[None]).sum(1))


def layer(dtype, device):
    def randn(*shape):
        return torch.randn(shape).to(device, dtype)

    x, gate_up, down = randn(max(BATCHES), H), randn(E, 2 * I, H) / 7, randn(E, H, I) / 6
    weights, ids = torch.randn(max(BATCHES), E, device=device).softmax(-1).topk(K)
    return x, gate_up, down, weights, ids


def run(x, gate_up, down, weights, ids, tokens=slice(None)):
    return tmoe.fused_experts(x[tokens], gate_up, down, weights[tokens], ids[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype, device):
    """DT01"""
    tensors = layer(dtype, device)
    with tmoe.options(backend="triton", batch_invariant=True):
        whole = run(*tensors)
        for T in BATCHES:
            assert torch.equal(run(*tensors, slice(T)), whole[:T])
        for t in (1, 77, 127):
            assert torch.equal(run(*tensors, slice(t, t + 1)), whole[t : t + 1])
            assert torch.equal(run(*tensors, [9, t, 5])[1], whole[t])


@pytest.mark.parametrize("T", [3, 33])
def test_every_run_gives_the_same_bits(T, device):
    """DT03, DT04: without asking for it."""
    tensors = layer(torch.bfloat16, device)
    with tmoe.options(backend="triton"):
        first = run(*tensors, slice(T))
        assert all(torch.equal(run(*tensors, slice(T)), first) for _ in range(3))


def test_the_grouped_gemm_does_not_depend_on_its_batch(device):
    a, b = torch.randn(160, H, device=device), torch.randn(E, 24, H, device=device)
    many = torch.tensor([0, 100, 100, 150, 160], dtype=torch.int32, device=device)
    one = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32, device=device)
    with tmoe.options(backend="triton", batch_invariant=True):
        whole = tmoe.grouped_gemm(a, b, many)
        assert torch.equal(tmoe.grouped_gemm(a[120:121], b, one), whole[120:121])
