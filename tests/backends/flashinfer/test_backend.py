"""Layers on FlashInfer: prepared, called right, and left alone where FlashInfer can't do them.

A stand-in plays FlashInfer and its device: it checks every argument and computes the answer from
the prepared weights. The machine says that it is a B200 (or an H200); tensors are on the CPU, and
Triton's kernels, with which answers are compared, run in its interpreter.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import tmoe
from tests.backends.flashinfer.layers import (
    CUTLASS,
    OAI,
    SWIGLU,
    TRTLLM,
    E,
    H,
    I,
    K,
    Layer,
    relative_error,
)
from tmoe.activation import Activation
from tmoe.backends.flashinfer import support
from tmoe.dispatch import verify
from tmoe.formats import SCHEMES

LAYERS = [
    (TRTLLM, (10, 0), None, SWIGLU, {}),
    (TRTLLM, (10, 3), None, OAI, {"window": (1, 2)}),
    (TRTLLM, (10, 0), None, Activation("relu2"), {}),
    (TRTLLM, (10, 0), "fp8_tensor", SWIGLU, {}),
    (TRTLLM, (10, 0), "fp8_tensor", SWIGLU, {"on_input": True}),
    (TRTLLM, (10, 0), "fp8_tensor", Activation.swiglu_step(limit=1.0), {"window": (2, 2)}),
    (TRTLLM, (10, 0), "fp8_block", SWIGLU, {"window": (0, 2)}),
    (TRTLLM, (10, 0), "mxfp8", OAI, {}),
    (TRTLLM, (10, 0), "mxfp4_a8", OAI, {"bias": True}),
    (TRTLLM, (10, 0), "mxfp4_a16", OAI, {"bias": True}),
    (TRTLLM, (10, 3), "nvfp4", SWIGLU, {}),
    (TRTLLM, (10, 0), "nvfp4", OAI, {"bias": True, "window": (2, 2)}),
    (CUTLASS, (9, 0), None, SWIGLU, {"bias": True}),
    (CUTLASS, (10, 0), None, Activation("geglu_tanh"), {"window": (2, 2)}),
    (CUTLASS, (9, 0), "fp8_tensor", OAI, {"bias": True}),
    (CUTLASS, (9, 0), "fp8_block", SWIGLU, {"window": (0, 2)}),
    (CUTLASS, (10, 0), "nvfp4", SWIGLU, {"bias": True}),
    (CUTLASS, (10, 3), "mxfp4_a8", OAI, {"bias": True}),
]


# Interpreted FP4 kernels are slow: these are compared with torch only, below.
SLOW = [(TRTLLM, "mxfp8"), (TRTLLM, "mxfp4_a16"), (CUTLASS, "nvfp4"), (CUTLASS, "mxfp4_a8")]


@pytest.mark.parametrize(("backend", "capability", "scheme", "activation", "options"), LAYERS)
def test_a_prepared_layer_runs_on_flashinfer(backend, capability, scheme, activation, options, on):
    with on(capability=capability) as fake:
        layer = Layer(scheme, activation, **options)
        with tmoe.options(backend=backend), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            layer.prepare(verify=(backend, scheme) not in SLOW)
            arguments = layer.tokens()
            before = len(fake.calls)
            y = layer(*arguments)
        (called,) = fake.calls[before:]
        use = support.USES[backend][scheme or "bf16"]
        assert called[0] == use.entry.name
        assert set(called[1]) >= set(support.keywords_of(use, activation))
        with tmoe.options(backend="torch"):
            want = layer(*arguments)
        assert y.dtype == torch.bfloat16 and y.shape == want.shape
        inputs = scheme and SCHEMES[scheme].inputs
        step = verify.BOUNDS[inputs.format.element.name if inputs else "bf16"]
        assert relative_error(y, want) < step
        out = torch.full_like(y, torch.nan)
        with tmoe.options(backend=backend):
            assert layer(*arguments, out=out) is out
        assert torch.equal(out, y)


@pytest.mark.parametrize("version", ["0.6.16", "0.6.16.post4", "0.6.17", "0.6.18.post1"])
def test_ids_and_weights_in_one_tensor_where_a_version_wants_that(version, on):
    with on(version) as fake:
        layer = Layer("fp8_block", window=(2, 2))
        layer.prepare()
        x, weights, ids = layer.tokens()
        ids[0, 1] = -1
        y = layer(x, weights, ids)
        (name, keywords) = fake.calls[-1]
        assert name == "trtllm_fp8_block_scale_routed_moe"
        assert isinstance(keywords["topk_ids"], tuple) == (version == "0.6.18.post1")
        with tmoe.options(backend="torch"):
            assert relative_error(y, layer(x, weights, ids)) < verify.BOUNDS["e4m3"]


def test_no_tokens(b200):
    layer = Layer()
    with tmoe.prepare():
        assert layer(*layer.tokens(0)).shape == (0, H)
    layer.prepare()
    b200.calls.clear()
    assert layer(*layer.tokens(0)).shape == (0, H) and b200.calls == []


def test_training_and_batch_invariance_stay_on_ours(b200):
    layer = Layer()
    layer.prepare()
    b200.calls.clear()
    x, *rest = layer.tokens()
    layer(x.requires_grad_(), *rest).sum().backward()
    with tmoe.options(batch_invariant=True):
        layer(x.detach(), *rest)
    assert b200.calls == [] and x.grad.isfinite().all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_sum(deterministic, b200):
    layer = Layer()
    with tmoe.options(backend=CUTLASS, deterministic=deterministic):
        layer.prepare()
        layer(*layer.tokens())
    assert b200.calls[-1][1]["use_fused_finalize"] is not deterministic


@pytest.mark.parametrize(
    ("scheme", "function"),
    [(None, "trtllm_bf16_routed_moe"), ("nvfp4", "trtllm_fp4_block_scale_routed_moe")],
)
def test_a_module_and_explain(scheme, function, b200):
    layer = tmoe.MoE(H, I, tmoe.Routing(E, K, "Renormalize"), dtype=torch.bfloat16)
    layer.requires_grad_(False)
    if scheme is not None:
        scale = torch.tensor(4 / (6 * 448))
        layer = tmoe.MoE.quantized(layer, scheme, input_scale=scale, hidden_scale=scale / 8)
    x = torch.randn(3, H).bfloat16()
    assert tmoe.explain(layer).chosen == "triton"
    with tmoe.prepare(), tmoe.options(verify=False):
        layer(x)
    decision = tmoe.explain(layer)
    assert decision.chosen == TRTLLM and "compared with Triton when it is prepared" in str(decision)
    verify.remember(TRTLLM, decision.problem, None)
    assert "; agrees with Triton" in str(tmoe.explain(layer))
    b200.calls.clear()
    y = layer(x)
    assert [name for name, _ in b200.calls] == [function]
    with tmoe.options(backend="torch"):
        bound = verify.BOUNDS["bf16" if scheme is None else "e2m1"]
        assert relative_error(y, layer(x)) < bound
