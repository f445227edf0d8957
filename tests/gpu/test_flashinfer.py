"""FlashInfer for real, where it is installed: prepared, verified, and right at a model's sizes."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.reference import quantized
from tmoe.backends.flashinfer.support import STATIC, USES, why_not
from tmoe.bench.shapes import SHAPES
from tmoe.dispatch import verify
from tmoe.dispatch.known import model_layer, problem_of
from tmoe.dispatch.problem import Machine
from tmoe.formats import SCHEMES
from tmoe.shapes import random_inputs, random_weights

pytestmark = pytest.mark.gpu
CASES = [(backend, scheme) for backend, uses in USES.items() for scheme in uses]


@pytest.mark.parametrize("num_tokens", [1, 100])
@pytest.mark.parametrize(("backend", "scheme"), CASES)
def test_a_layer(backend, scheme, num_tokens, device):
    name = "qwen3-30b-a3b"
    asked = None if scheme == "bf16" else scheme
    problem = problem_of(
        model_layer(name), Machine.of(device), num_tokens=num_tokens, dtype=torch.bfloat16,
        scheme=asked,
    )  # fmt: skip
    if reason := why_not(backend, problem):
        pytest.skip(f"{backend} {reason}")
    weights = random_weights(SHAPES[name], device, torch.bfloat16)
    if asked is not None:
        weights = [quantized(w, SCHEMES[asked].weights[0]) for w in weights]
    scale = torch.tensor(0.01, device=device) if asked in STATIC else None
    x, topk_weights, ids = random_inputs(SHAPES[name], num_tokens, device, torch.bfloat16)

    def run():
        return tmoe.fused_experts(
            x, *weights, topk_weights, ids, scheme=asked, input_scale=scale, hidden_scale=scale
        )

    with torch.no_grad(), tmoe.options(backend=backend):
        with tmoe.prepare():
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
        graph.replay()
    with torch.no_grad(), tmoe.options(backend="torch"):
        want = run()
    bound = verify.BOUNDS["bf16"] if asked is None else max(verify.BOUNDS.values())
    assert (y - want).norm() <= bound * want.norm()
    tmoe.release()
