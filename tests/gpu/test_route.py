"""The router kernel at the numbers of experts of real models."""

from __future__ import annotations

import pytest
import torch

from tests.checking import assert_matches
from tmoe.kernels.route import route, route_ref

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PLAIN = dict(weight="softmax")  # Renormalize
SIGMOID = dict(score="sigmoid", renormalize=True, epsilon=1e-20)  # DeepSeekV3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("E, K", [(8, 2), (64, 6), (128, 8), (256, 8), (384, 8), (512, 22)])
def test_real_shapes(E, K, dtype, device):
    logits = torch.randn(8192, E, device=device).to(dtype)
    weights, ids = route(logits, top_k=K, **PLAIN)
    naive, ids_ref = route_ref(logits, top_k=K, **PLAIN)
    assert torch.equal(ids, ids_ref)
    assert_matches(weights, route_ref(logits.double(), top_k=K, **PLAIN)[0], naive)
    row = torch.randint(8192, (1,)).item()
    alone = route(logits[row : row + 1], top_k=K, **PLAIN)
    assert torch.equal(alone[0][0], weights[row]) and torch.equal(alone[1][0], ids[row])


def test_real_shape_deepseek(device):
    logits, bias = torch.randn(8192, 256, device=device), torch.randn(256, device=device)
    recipe = SIGMOID | dict(top_k=8, n_group=8, topk_group=4, scaling_factor=2.5)
    weights, ids = route(logits, bias=bias, **recipe)
    naive, ids_ref = route_ref(logits, bias=bias, **recipe)
    assert torch.equal(ids, ids_ref)
    torch.testing.assert_close(weights, naive, rtol=1e-6, atol=0)


def test_row_offsets_past_32_bits(device):
    E, T = 1024, 2**22 + 3
    logits = torch.zeros(T, E, dtype=torch.bfloat16, device=device)
    logits[-1, 1000] = 1
    _, ids = route(logits, top_k=2, **PLAIN)
    assert ids[-1].tolist() == [1000, 0] and ids[-2].tolist() == [0, 1]
