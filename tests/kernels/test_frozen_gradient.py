"""The gradient through quantised weights: every format, odd sizes, gathered rows, an adapter."""

from __future__ import annotations

import math

import pytest
import torch

from tests.checking import assert_matches
from tests.reference import quantized
from tmoe.backends.triton_quantized import weight_scales
from tmoe.formats import SCHEMES
from tmoe.kernels.frozen_gradient import frozen_gradient, frozen_gradient_ref
from tmoe.kernels.low_rank import LowRankRows
from tmoe.kernels.sort import sort_tokens
from tmoe.kernels.tiles import Tile

TILE = Tile(16, 64, 32, 4, 2)
WEIGHTS = {recipe.words: recipe for s in SCHEMES.values() for recipe in s.weights}


def rows_of(T, E, K, device):
    ids = torch.stack([torch.randperm(E, device=device)[:K] for _ in range(T)])
    ids[0, 0] = -1
    return sort_tokens(ids, num_experts=E, block_m=TILE.block_m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N, D", [(96, 160), (40, 48), (272, 32)], ids=str)
@pytest.mark.parametrize("words", WEIGHTS, ids=str)
def test_every_format(words, N, D, dtype, device):
    T, E, K = 9, 3, 2
    with device:
        q = quantized(torch.randn(E, N, D) / math.sqrt(N), WEIGHTS[words])
        order = rows_of(T, E, K, device)
        a = torch.randn(T, N).to(dtype)
        out = torch.empty(T * K, D, dtype=dtype)
    frozen_gradient(out, a, q.data, order, TILE, scales=weight_scales(q), gather=True)
    ends = order.expert_offsets
    end = int(ends[-1])
    rows = a[order.row_to_slot[:end].long() // K]
    naive = frozen_gradient_ref(rows, q.dequantize(dtype), ends)
    truth = frozen_gradient_ref(rows.double(), q.dequantize().double(), ends)
    assert_matches(out[:end].double(), truth, naive)
    assert out[end:].isnan().all()  # nobody wrote there


@pytest.mark.parametrize("rank", [1, 4, 16, 70])
def test_with_an_adapter(rank, device):
    T, E, K, N, D = 9, 3, 2, 96, 160
    with device:
        q = quantized(torch.randn(E, N, D) / math.sqrt(N), SCHEMES["nvfp4_a16"].weights[0])
        order = rows_of(T, E, K, device)
        a, low = torch.randn(T * K, N), torch.randn(T * K, rank)
        up = torch.randn(E, rank, D).transpose(1, 2)
        out = torch.empty(T * K, D)
    adapter = LowRankRows(low, up)
    frozen_gradient(out, a, q.data, order, TILE, scales=weight_scales(q), adapter=adapter)

    def reference(dtype):
        ends = order.expert_offsets
        y = frozen_gradient_ref(a.to(dtype), q.dequantize().to(dtype), ends)
        return y + frozen_gradient_ref(low.to(dtype), up.transpose(1, 2).to(dtype), ends)

    end = int(order.expert_offsets[-1])
    assert_matches(
        out[:end].double(), reference(torch.float64)[:end], reference(torch.float32)[:end]
    )
