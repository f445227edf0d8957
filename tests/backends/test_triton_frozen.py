"""What a step of frozen experts allocates: rows and factors, nothing as large as the weights."""

from __future__ import annotations

import math

import pytest
import torch

from tests.live_bytes import LiveBytes
from tests.reference import quantized
from tmoe.backends.triton_backend import TritonBackend
from tmoe.dispatch.backend import NO_SCALES
from tmoe.dispatch.problem import Adapters, ExpertsSpec, ExpertTensors, FrozenGradients
from tmoe.formats import SCHEMES

E, T, K, H, I, RANK = 16, 2, 2, 128, 64, 1


@pytest.mark.parametrize("scheme", [None, "fp8_channel", "fp8_block", "mxfp4_a16", "nvfp4"])
def test_no_copy_of_the_weights(scheme, device):
    """Neither dequantised nor transposed, nor W + BA or its gradient: the smaller projection's
    codes alone are more than all that exists at a time."""
    with device:
        shapes = {"gate_up": (E, 2 * I, H), "down": (E, H, I)}
        weights = [torch.randn(shape) / math.sqrt(shape[2]) for shape in shapes.values()]
        factors = [(E, RANK, H), (E, 2 * I, RANK), (E, RANK, I), (E, H, RANK)]
        adapters = Adapters(*(torch.randn(shape) for shape in factors))
        x, topk_weights = torch.randn(T, H), torch.rand(T, K)
        ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
    if scheme is not None:
        weights = [quantized(weight, SCHEMES[scheme].weights[0]) for weight in weights]
    spec, backend = ExpertsSpec(num_experts=E, scheme=scheme), TritonBackend()
    tensors = ExpertTensors(x, *weights, topk_weights, ids)
    arguments = (tensors, spec, NO_SCALES, adapters)
    wanted = FrozenGradients(True, True, False, False, True, True, True, True)
    held = [part for w in weights for part in (w.parts() if scheme else [w])]
    with LiveBytes([x, topk_weights, ids, *held, *adapters]) as memory:
        y, kept = backend.train_frozen(*arguments)
        gradients = backend.frozen_backward(y, *arguments, kept, wanted, True)
    assert all(gradients[i].any() for i in (0, 1, 4, 5, 6, 7))
    of_factors = sum(factor.nbytes for factor in adapters)
    of_rows = x.itemsize * T * K * (2 * (H + 6 * I) + 8 * RANK) + 2**13  # and of indices
    assert memory.most <= of_factors + of_rows < E * H * I // 2, memory.most
