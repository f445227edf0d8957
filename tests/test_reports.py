"""Faults that users of other libraries reported, where no other test is the place for them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tmoe
from tests.checking import assert_matches
from tests.processes import python_path
from tests.reference import fused_experts_ref, grouped_gemm_ref
from tmoe import environment, registry
from tmoe.backends.torch_grouped import _aligned
from tmoe.dispatch.problem import Machine, Problem
from tmoe.options import Options

ROOT = Path(__file__).parents[1]


def test_torch_without_a_grouped_gemm(monkeypatch):
    """EN08: and strides that torch's own would refuse."""
    monkeypatch.delattr(F, "grouped_mm", raising=False)
    a, b = torch.randn(6, 8), torch.randn(3, 8, 5).transpose(1, 2)
    offsets = torch.tensor([0, 1, 1, 6], dtype=torch.int32)
    with tmoe.options(backend="torch"):
        y = tmoe.grouped_gemm(a, b, offsets)
    assert_matches(
        y, grouped_gemm_ref(a, b, offsets), grouped_gemm_ref(a, b, offsets, dtype=a.dtype)
    )


def test_what_torchs_grouped_gemm_takes():
    """EN08: strides that are multiples of 16 bytes, along one of the two dimensions."""
    bf16 = torch.empty(4, 64, 64, dtype=torch.bfloat16)
    assert _aligned(bf16) and _aligned(bf16.transpose(1, 2)) and _aligned(bf16[:, :, 8:])
    assert not _aligned(bf16[:, :, 4:])  # starts at 8 bytes
    assert not _aligned(bf16[:, ::2, ::2])
    assert not _aligned(torch.empty(4, 64, 60, dtype=torch.bfloat16))


def test_an_intermediate_size_that_is_half_a_tile_more(backend, device):
    """SH04: 704 = 5 · 128 + 64."""
    E, T, K, H, I = 2, 3, 2, 32, 704
    with device:
        x, weights = torch.randn(T, H), torch.rand(T, K)
        gate_up, down = torch.randn(E, 2 * I, H) / math.sqrt(H), torch.randn(E, H, I) / I
        ids = torch.tensor([[0, 1], [1, 0], [1, 0]], dtype=torch.int32)
    y = tmoe.fused_experts(x, gate_up, down, weights, ids)
    args = (x, gate_up, down, weights, ids)
    assert_matches(y, fused_experts_ref(*args), fused_experts_ref(*args, dtype=x.dtype))


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4_a16", "mxfp4_a16"])
def test_packed_weights_do_not_change_a_width(scheme, device):
    """SH13: sizes come from the weights' numbers, whatever a byte of them holds."""
    E, T, H, I = 2, 3, 64, 32
    format = tmoe.formats.SCHEMES[scheme].weights[0].format.name
    gate_up = tmoe.quantize(torch.randn(E, 2 * I, H, device=device), format)
    down = tmoe.quantize(torch.randn(E, H, I, device=device), format)
    x = torch.randn(T, H, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(T, 1, dtype=torch.int32, device=device)
    y = tmoe.fused_experts(x, gate_up, down, torch.ones(T, 1, device=device), ids, scheme=scheme)
    assert y.shape == (T, H) and gate_up.shape == (E, 2 * I, H)
    rows = tmoe.grouped_gemm(x, gate_up, torch.tensor([0, 3, 3]).int().to(device), scheme=scheme)
    assert rows.shape == (T, 2 * I)


def test_nothing_is_summed_without_weights():
    """SC11: they are no option."""
    with pytest.raises(TypeError, match="topk_weights"):
        tmoe.fused_experts(torch.randn(3, 4), torch.randn(2, 4, 4), torch.randn(2, 4, 2))


@pytest.mark.parametrize("op", ["route", "router", "quantize", "grouped_gemm", "fused_experts"])
def test_who_is_batch_invariant_is_what_the_option_says(op):
    """DT05."""
    machine = Machine("cuda", "NVIDIA H200", (9, 0), triton_version="3.6.0")
    problem = Problem(op, 64, 128, 64, 8, 2, torch.bfloat16, machine, batch_invariant=True)
    assert registry.load("triton").why_not(problem) is None
    refused = registry.load("torch").why_not(problem) is not None
    assert refused == (op not in ("route", "quantize"))
    said = " ".join(str(Options.__doc__).split())
    assert "Triton's operations can do that" in said and "only routing and quantising" in said


def test_a_path_in_the_environment_is_no_part_of_what_is_kept(tmp_path):
    """CG09: the same toolkit and the same sources by another way are the same machine."""
    (tmp_path / "checkout").symlink_to(ROOT)
    program = (
        "from tmoe.dispatch.measure import store_of; from tmoe.dispatch.problem import Machine;"
        "print(store_of(Machine.of('cpu')).path.name)"
    )
    names = set()
    for root, toolkit in ((ROOT, tmp_path / "cuda"), (tmp_path / "checkout", tmp_path / "cuda-13")):
        env = {**os.environ, "PYTHONPATH": python_path(root=root), "CUDA_HOME": str(toolkit)}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        names.add(done.stdout)
    assert len(names) == 1 and environment.kernels_hash()
