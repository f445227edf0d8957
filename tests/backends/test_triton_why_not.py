"""What the Triton backend takes and what it refuses, asked about machines that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tmoe.backends.triton_backend import TritonBackend
from tmoe.dispatch.problem import Machine, Problem
from tmoe.dispatch.resolve import candidates
from tmoe.formats import FORMATS, SCHEMES, Scheme
from tmoe.formats.recipe import Recipe

H200 = Machine("cuda", "NVIDIA H200", (9, 0), triton_version="3.6.0")
PROBLEM = Problem(
    op="fused_experts", tokens=64, hidden=2048, intermediate=768, num_experts=128, top_k=8,
    dtype=torch.bfloat16, machine=H200,
)  # fmt: skip


def why_not(machine: Machine = H200, **changes) -> str | None:
    return TritonBackend().why_not(replace(PROBLEM, machine=machine, **changes))


@pytest.mark.parametrize(
    "capability",
    [(8, 0), (8, 6), (8, 9), (9, 0), (9, 4), (10, 0), (10, 3), (12, 0), (12, 1)],
    ids=lambda c: f"{c[0]}.{c[1]}",
)
def test_takes_every_gpu_from_8_0_on(capability):
    """HW02, HW03: each capability by its own number, AMD's 9.4 among them."""
    assert why_not(replace(H200, capability=capability)) is None


def test_refuses_older_gpus_by_number():
    refusal = why_not(replace(H200, capability=(7, 5)))
    assert "8.0" in refusal and "7.5" in refusal


@pytest.mark.parametrize("op", ["route", "grouped_gemm", "fused_experts"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:]
)
def test_takes_the_dtypes(op, dtype):
    assert why_not(op=op, dtype=dtype) is None


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (replace(H200, triton_version=None), "isn't installed"),
        (replace(H200, triton_version="3.5.1"), "3.5.1"),
        (Machine("cpu", triton_version="3.7.1"), "TRITON_INTERPRET=1"),
        (Machine("mps", triton_version="3.7.1"), "mps"),
    ],
    ids=["no-triton", "old-triton", "cpu", "mps"],
)
def test_refuses_machines_in_words(machine, said):
    assert said in why_not(machine)


def test_takes_a_cpu_under_the_interpreter():
    assert why_not(Machine("cpu", triton_version="3.7.1", interpreted=True)) is None


def test_newer_and_local_versions_of_triton_are_fine():
    """EN02: compared as versions, local suffix and all, not as text."""
    for version in ("3.6.0+git1234", "3.10.0", "4.0.0rc1"):
        assert why_not(replace(H200, triton_version=version)) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"needs_grad": True, "coded": True, "scheme": "fp8_block"}, "quantised already has no"),
        ({"needs_grad": True, "op": "router"}, "router have no backward"),
        ({"dtype": torch.float64}, "float64"),
        ({"scheme": "fp8_block", "dtype": torch.float16}, "fp16 has no room for fp8_block"),
    ],
    ids=["gradients of a coded input", "gradients of a router", "fp64", "quantised"],
)
def test_refuses_problems_in_words(change, said):
    assert said in why_not(**change)


def test_deterministic_and_batch_invariant_are_fine():
    assert why_not(deterministic=True, batch_invariant=True) is None


def test_quantised_weights():
    """fp16 overflows at 65504; scales don't stop there."""
    assert why_not(scheme="mxfp4_a16") is None
    assert why_not(op="quantize", scheme="mxfp4_a16", dtype=torch.float16) is None


def test_refuses_scales_of_other_blocks(monkeypatch):
    """A format that somebody adds: the kernel would read its scales as if they were fine ones."""
    block_64 = replace(FORMATS["fp8_block"], name="fp8_block_64", block_shapes=((64, 64),))
    recipe = Recipe.of("test", block_64)
    plain = {"weights": (recipe,), "inputs": None}
    rounded = {"weights": SCHEMES["fp8_block"].weights, "inputs": recipe}
    for name, how in (("new_a16", plain), ("new", rounded)):
        monkeypatch.setitem(SCHEMES, name, Scheme(name, **how))
        said = "fp32 scales reach along a row or along 128 of it, those of fp8_block_64 64"
        assert why_not(scheme=name) == why_not(scheme=name, op="grouped_gemm") == said
        assert why_not(scheme=name, op="quantize") is None
    assert all(why_not(scheme=name) is None for name in SCHEMES if "new" not in name)


@pytest.mark.parametrize(
    ("capability", "scheme", "said"),
    [
        ((9, 0), "fp8_block", "e4m3 codes are multiplied as they are"),
        ((8, 0), "fp8_block", "codes become bf16"),
        ((9, 0), "nvfp4", "inputs and weights are multiplied as bfloat16"),
        ((10, 0), "nvfp4", "block-scaled codes are multiplied as they are"),
        ((12, 0), "mxfp8", "block-scaled codes are multiplied as they are"),
        ((12, 0), "mxfp4_a8", "inputs and weights are multiplied as bfloat16"),
        ((10, 0), "mxfp4_a16", "weights become bfloat16"),
    ],
    ids=lambda v: v if isinstance(v, str) else f"{v[0]}.{v[1]}",
)
def test_says_what_happens_to_codes(capability, scheme, said):
    problem = replace(PROBLEM, machine=replace(H200, capability=capability), scheme=scheme)
    assert said in TritonBackend().form(problem)
    (answer,) = candidates(problem, {"triton": TritonBackend()})
    assert answer.accepted and answer.reason.endswith(TritonBackend().form(problem))


def test_says_nothing_where_there_is_no_choice():
    assert TritonBackend().form(PROBLEM) == ""
    assert TritonBackend().form(replace(PROBLEM, op="quantize", scheme="nvfp4")) == ""
