"""A process with GPUs: no tokens, another device, a fork after the import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tmoe
from tests.gpu.conftest import NEEDS_TWO
from tests.gpu.layers import QWEN3, inputs, run

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
ROOT = Path(__file__).parents[2]

FORKED = """
import os, sys
import torch
import tmoe
assert not torch.cuda.is_initialized(), "importing tmoe started CUDA"
child = os.fork()
if child == 0:
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(4, 64, 64, device="cuda", dtype=torch.bfloat16)
    down = torch.randn(4, 64, 32, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(4, 1, dtype=torch.int32, device="cuda")
    with tmoe.options(backend="triton"):
        y = tmoe.fused_experts(x, gate_up, down, torch.ones(4, 1, device="cuda"), ids)
    os._exit(0 if y.isfinite().all().item() else 1)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("backend", ["triton", None])
def test_no_tokens_and_then_some(backend, device):
    """EM02, EM03, EM04: a launch with an empty grid would only show in the next call."""
    weights, tokens = QWEN3.weights(device, BF16), inputs(QWEN3, 3, device, BF16)
    none = {name: value[:0] for name, value in tokens.items()}
    E, K = QWEN3.shape.num_experts, QWEN3.shape.top_k
    with tmoe.options(backend=backend):
        assert tmoe.fused_experts(**none, **weights).shape == none["x"].shape
        logits = torch.randn(0, E, device=device)
        topk_weights, topk_ids = tmoe.route(logits, tmoe.Routing(E, K, "Renormalize"))
        assert topk_weights.shape == topk_ids.shape == (0, K)
        offsets = torch.zeros(E + 1, dtype=torch.int32, device=device)
        y = tmoe.grouped_gemm(none["x"], weights["gate_up_proj"], offsets)
        assert y.shape == (0, weights["gate_up_proj"].shape[1])
        torch.cuda.synchronize()
        assert tmoe.fused_experts(**tokens, **weights).isfinite().all()


def test_no_token_for_any_local_expert(device):
    """EM06: rows, but none that an expert owns."""
    tensors = inputs(QWEN3, 5, device, BF16) | QWEN3.weights(device, BF16)
    tensors["topk_ids"] = torch.full_like(tensors["topk_ids"], -1)
    assert (run(tensors, QWEN3.keywords) == 0).all()


@NEEDS_TWO
def test_tensors_on_another_device_than_the_current_one():
    """EN07"""
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    tensors = inputs(QWEN3, 33, first, BF16) | QWEN3.weights(first, BF16)
    want = run(tensors, QWEN3.keywords)
    there = {name: value.to(second) for name, value in tensors.items()}
    with torch.cuda.device(first):
        got = run(there, QWEN3.keywords)
        assert torch.cuda.current_device() == 0
    assert got.device == second
    assert torch.equal(got.cpu(), want.cpu())


def test_the_import_survives_a_fork():
    """EN06, in a process that has not touched the GPU."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
