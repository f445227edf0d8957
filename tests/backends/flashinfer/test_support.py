"""What FlashInfer could run, asked about machines and versions that aren't here."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tmoe.activation import Activation
from tmoe.backends.flashinfer import support
from tmoe.backends.flashinfer.signatures import binds, recorded_versions, signature
from tmoe.backends.flashinfer.support import RULES, USES, why_not
from tmoe.dispatch.known import GPUS, MODELS, machine_with, problem_of
from tmoe.formats import SCHEMES

TRTLLM, CUTLASS = "flashinfer_trtllm", "flashinfer_cutlass"


def problem(
    gpu="B200", model="deepseek-v3", scheme=None, num_tokens=64, version="0.7.4", **changes
):
    machine = replace(machine_with(gpu), flashinfer_version=version)
    layer = MODELS[model]
    asked = problem_of(layer, machine, num_tokens=num_tokens, dtype=torch.bfloat16, scheme=scheme)
    return replace(asked, **changes)


# Typed in from notes on FlashInfer's sources and releases: GPU, scheme and version -> what is said.
DECISIONS = [
    (TRTLLM, "B200", None, "0.7.4", None),
    (TRTLLM, "B200", None, "0.6.18.post1", None),
    (TRTLLM, "B200", None, "0.6.17", "needs FlashInfer 0.6.18 for trtllm_bf16_routed_moe"),
    (TRTLLM, "B300", None, "0.7.4", None),
    (TRTLLM, "H200", None, "0.7.4", "on compute capability 10.0 or 10.3, got 9.0"),
    (TRTLLM, "RTX 5090", "fp8_block", "0.7.4", "10.0 or 10.3, got 12.0"),
    (TRTLLM, "MI300X", None, "0.7.4", "got 9.4"),
    (TRTLLM, "B200", "fp8_block", "0.7.0", None),
    (TRTLLM, "B200", "fp8_block", "0.6.16", None),
    (TRTLLM, "B200", "fp8_block", "0.6.15", "needs FlashInfer 0.6.16 for trtllm_fp8_block_scale"),
    (TRTLLM, "B200", "fp8_tensor", "0.7.2.post1", None),
    (TRTLLM, "B200", "fp8_tensor", "0.6.15", "needs FlashInfer 0.6.18"),
    (TRTLLM, "B200", "mxfp8", "0.7.4", None),
    (TRTLLM, "B200", "nvfp4", "0.6.16", None),
    (TRTLLM, "B200", "nvfp4", "0.6.16.post4", None),
    (TRTLLM, "B200", "nvfp4", "0.6.16+cu130", None),  # EN02
    (TRTLLM, "B200", "nvfp4", "0.6.15+cu130", "needs FlashInfer 0.6.16"),
    (TRTLLM, "B300", "nvfp4", "0.6.12", "needs FlashInfer 0.6.16 .* mended an address past"),
    (TRTLLM, "B200", "mxfp4_a8", "0.7.4", None),
    (TRTLLM, "B200", "mxfp4_a16", "0.7.4", None),
    (TRTLLM, "B300", "mxfp4_a16", "0.7.4", "mxfp4_a16 on compute capability 10.0, got 10.3"),
    (TRTLLM, "B200", "fp8_channel", "0.7.4", "has no kernels for fp8_channel; it has bf16, fp8_t"),
    (TRTLLM, "B200", "nvfp4_a16", "0.7.4", "has no kernels for nvfp4_a16"),
    (TRTLLM, "B200", "nvfp4", "0.8.0", "knows FlashInfer below 0.8, got 0.8.0"),
    (TRTLLM, "B200", "nvfp4", "0.8.0rc1", "knows FlashInfer below 0.8"),
    (TRTLLM, "B200", "nvfp4", None, "FlashInfer isn't installed"),
    (TRTLLM, "B200", "nvfp4", "unknown", "version can't be read: unknown"),
    (TRTLLM, "B200", "nvfp4", "0.0.0+unknown", "needs FlashInfer 0.6.16"),
    (CUTLASS, "B200", None, "0.6.15", None),
    (CUTLASS, "B200", None, "0.6.12", "needs FlashInfer 0.6.15 .* deterministic"),
    (CUTLASS, "H200", None, "0.7.4", None),
    (CUTLASS, "H100", "fp8_tensor", "0.7.4", None),
    (CUTLASS, "H200", "fp8_block", "0.7.4", None),
    (CUTLASS, "B200", "fp8_block", "0.7.4", "fp8_block on compute capability 9.0, got 10.0"),
    (CUTLASS, "H200", "nvfp4", "0.7.4", "10.0 or 10.3, got 9.0"),
    (CUTLASS, "B300", "nvfp4", "0.7.4", None),
    (CUTLASS, "B200", "mxfp4_a8", "0.7.0", None),
    (CUTLASS, "A100", None, "0.7.4", "got 8.0"),
    (CUTLASS, "B200", "mxfp4_a16", "0.7.4", "mxfp4_a16 on compute capability 9.0, got 10.0"),
    (CUTLASS, "H200", "mxfp4_a16", "0.7.4", None),
    (CUTLASS, "H200", "mxfp4_a16", "0.6.17", "needs FlashInfer 0.6.18 .* the order of the scales"),
    (CUTLASS, "H200", "mxfp8", "0.7.4", "has no kernels for mxfp8"),
]


@pytest.mark.parametrize(("backend", "gpu", "scheme", "version", "said"), DECISIONS)
def test_decisions(backend, gpu, scheme, version, said):
    refusal = why_not(backend, problem(gpu, scheme=scheme, version=version))
    assert_said(refusal, said)


def assert_said(refusal, said):
    if said is None:
        assert refusal is None
    else:
        assert refusal is not None and re.search(said, refusal), refusal


LAYERS = [
    (TRTLLM, "fp8_block", {"activation": Activation.swiglu_oai()}, "has swiglu, swiglu without"),
    (TRTLLM, "fp8_block", {"intermediate": 192}, "intermediate size that is a multiple of 128"),
    (TRTLLM, "fp8_block", {"hidden": 2880}, "a hidden size that is a multiple of 128.*got 2880"),
    (TRTLLM, "mxfp4_a8", {"hidden": 2880, "intermediate": 2880, "has_bias": True}, None),
    (TRTLLM, None, {"has_bias": True}, "adds no biases in bf16"),
    (CUTLASS, None, {"has_bias": True}, None),
    (TRTLLM, None, {"num_experts": 6}, "a multiple of 4 experts, up to 2048, got 6"),
    (TRTLLM, None, {"num_experts": 4096}, "up to 2048, got 4096"),
    (TRTLLM, None, {"top_k": 33}, "up to 32 experts per token, got 33"),
    (TRTLLM, None, {"dtype": torch.float16}, "returns bfloat16 in this scheme, x is float16"),
    (TRTLLM, None, {"needs_grad": True}, "no backward"),
    (TRTLLM, None, {"batch_invariant": True}, "depend on its batch"),
    (TRTLLM, "nvfp4", {"tokens": 524288}, "right up to 300000 tokens, got 524288"),
    (TRTLLM, "fp8_tensor", {"weight_on_input": True, "top_k": 1}, None),
    (TRTLLM, "fp8_tensor", {"weight_on_input": True}, "for 1 expert per token, got 8"),
    (TRTLLM, "nvfp4", {"weight_on_input": True, "top_k": 1}, "applies the routing weight to the o"),
    (CUTLASS, "fp8_tensor", {"weight_on_input": True, "top_k": 1}, "applies the routing weight"),
    (TRTLLM, "nvfp4", {"has_static_scales": False}, "inputs with static scales, none are given"),
    (TRTLLM, "fp8_tensor", {"has_static_scales": False}, "static scales, none are given"),
    (TRTLLM, "mxfp8", {"activation": Activation("geglu")}, "which GELU its GeGLU has"),
    (CUTLASS, None, {"activation": Activation("geglu_tanh")}, None),
    (
        TRTLLM,
        "mxfp4_a8",
        {"activation": Activation.swiglu_step(limit=7)},
        "swiglu_oai for MXFP4, got",
    ),
    (TRTLLM, "mxfp4_a16", {"activation": Activation("relu2")}, "swiglu_oai for MXFP4, got relu2"),
    (TRTLLM, "nvfp4", {"activation": Activation("relu2")}, None),
    (CUTLASS, None, {"dtype": torch.float16}, None),
    (TRTLLM, "fp8_block", {"window": (96, 96)}, None),
    (CUTLASS, "nvfp4", {"window": (64, 64)}, None),
    (CUTLASS, "nvfp4", {"window": (96, 64)}, "evenly among ranks, got 64 of 256 from 96"),
    (CUTLASS, "nvfp4", {"window": (0, 96)}, "evenly among ranks, got 96 of 256 from 0"),
    (
        TRTLLM,
        "fp8_tensor",
        {"activation": Activation.swiglu_step(limit=7), "version": "0.7.0"},
        "0.7.0 can't be called: it has no parameter gemm1_clamp_limit",
    ),
    (TRTLLM, "fp8_tensor", {"activation": Activation.swiglu_step(limit=7)}, None),
    (TRTLLM, None, {"op": "grouped_gemm"}, "whole expert layers only"),
]


@pytest.mark.parametrize(("backend", "scheme", "changes", "said"), LAYERS)
def test_layers_and_calls(backend, scheme, changes, said):
    assert_said(why_not(backend, problem(scheme=scheme, **changes)), said)


@pytest.mark.parametrize("backend", USES)
def test_every_scheme_gets_an_answer_everywhere(backend):
    versions = [None, "0.5.3", "0.9", *map(str, recorded_versions())]
    for scheme in (None, *SCHEMES):
        for gpu in GPUS:
            for version in versions:
                said = why_not(backend, problem(gpu, scheme=scheme, version=version))
                assert said is None or (len(said) > 20 and "\n" not in said)


@pytest.mark.parametrize("backend", USES)
def test_what_is_accepted_can_be_called(backend):
    """Every recorded version that is promoted takes the keywords of every call."""
    for scheme, use in USES[backend].items():
        assert scheme == "bf16" or scheme in SCHEMES
        weights = "bfloat16" if scheme == "bf16" else SCHEMES[scheme].weights[0].format.name
        assert weights in RULES[use.recipe].formats
        accepted = [
            version
            for version in recorded_versions()
            if support._about_version(use, problem(version=str(version))) is None
        ]
        assert str(accepted[-1]) == "0.7.4" and len(accepted) >= 4
        for version in accepted:
            takes = signature(version, use.entry.name)
            assert binds(takes, use.entry.keywords) is None


def test_a_signature_that_does_not_fit_is_a_reason(monkeypatch):
    use, other = USES[TRTLLM]["bf16"], USES[TRTLLM]["fp8_tensor"]
    entry = replace(use.entry, keywords=(*use.entry.keywords, "new_keyword"))
    said = support._about_version(replace(use, entry=entry), problem())
    assert "can't be called: it has no parameter new_keyword" in said
    absent = replace(other, entry=replace(other.entry, promoted_from="0.6.8"))
    said = support._about_version(absent, problem(version="0.6.12"))
    assert "FlashInfer 0.6.12 has no trtllm_fp8_per_tensor" in said
