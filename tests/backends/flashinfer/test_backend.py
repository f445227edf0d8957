"""Layers on FlashInfer: prepared once, verified, called right, and left alone where it is wrong.

A stand-in plays FlashInfer and its device: it checks every argument and computes the answer from
the prepared weights. The machine says that it is a B200 (or an H200); tensors are on the CPU, and
Triton's kernels, with which answers are compared, run in its interpreter.
"""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from functools import partial

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
    T,
    machine,
    relative_error,
    said_of,
)
from tmoe.activation import Activation
from tmoe.backends.flashinfer import backend as flashinfer_backend
from tmoe.backends.flashinfer import support
from tmoe.dispatch import measure, prepared, problem, verify
from tmoe.dispatch.problem import Machine
from tmoe.formats import SCHEMES


@pytest.fixture
def on(monkeypatch, tmp_path):
    """`machine`, with a cache folder of the test's own."""
    return partial(machine, monkeypatch, tmp_path)


@pytest.fixture
def b200(on):
    with on() as fake:
        yield fake


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


FAULTS = [
    ("llama4_weight_twice", "fp8_tensor", SWIGLU, {"on_input": True}),
    ("weight_twice", None, SWIGLU, {}),
    ("gate_up_swapped", "fp8_block", SWIGLU, {}),
    ("shuffle_ignored", "nvfp4", SWIGLU, {}),
    ("limit_in_raw_units", "nvfp4", OAI, {}),
    ("bf16_illegal_address", None, SWIGLU, {}),
    ("nan_answer", None, SWIGLU, {}),
    ("raises", "fp8_block", SWIGLU, {}),
]


@pytest.mark.parametrize(("fault", "scheme", "activation", "options"), FAULTS)
def test_what_is_wrong_stays_on_triton(fault, scheme, activation, options, on):
    with on(faults={fault}) as fake:
        layer = Layer(scheme, activation, **options)
        wrong = "failed when it was verified|of a row away from Triton's"
        with tmoe.options(backend=TRTLLM):
            with (
                pytest.warns(UserWarning, match="flashinfer_trtllm isn't used for fused_experts"),
                pytest.raises(tmoe.NoBackendError, match=wrong),
            ):
                layer.prepare(verify=True)
            with warnings.catch_warnings(), pytest.raises(tmoe.NoBackendError, match=wrong):
                warnings.simplefilter("error")  # it was said once
                layer.prepare(verify=True)
        assert tmoe.prepared() == [] and re.search(wrong, said_of(layer).reason)
        fake.calls.clear()
        arguments = layer.tokens()
        y = layer(*arguments)
        with tmoe.options(backend="triton"):
            assert fake.calls == [] and torch.equal(y, layer(*arguments))


def test_scales_next_to_zero_are_out_of_a_kernels_way(on):
    """Scales below 1e-10, which cutlass's FP8 blocks make NaN of, in every version."""
    with on(capability=(9, 0), faults={"near_zero_scales_nan"}):
        layer = Layer("fp8_block")
        layer.weights[1].scale[0] = 1e-20
        with tmoe.options(backend=CUTLASS):
            layer.prepare(verify=True)
            arguments = layer.tokens()
            y = layer(*arguments)
        with tmoe.options(backend="torch"):
            assert relative_error(y, layer(*arguments)) < verify.BOUNDS["e4m3"]


def test_a_flashinfer_that_breaks_on_import_is_a_reason(on):
    with on(faults={"import_error"}):
        layer = Layer()
        wrong = "FlashInfer can't be imported: flashinfer-cubin version"
        with tmoe.options(backend=TRTLLM), pytest.raises(tmoe.NoBackendError, match=wrong):
            with pytest.warns(UserWarning, match=f"{TRTLLM} isn't used for .*{wrong}"):
                layer.prepare(verify=True)
        assert tmoe.prepared() == [] and said_of(layer).reason.startswith(wrong)


def test_what_preparing_meets_does_not_end_a_call(on, monkeypatch):
    def no_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with on():
        layer = Layer()
        monkeypatch.setattr(flashinfer_backend.FlashInferBackend, "prepare", no_memory)
        with pytest.warns(UserWarning, match="can't take these weights: CUDA out of memory"):
            y = layer.prepare()
        assert y.isfinite().all() and tmoe.prepared() == []


@pytest.mark.parametrize("version", ["0.6.8", "0.6.12", "0.6.15", "0.6.16"])
def test_old_versions_are_never_called(version, on):
    with on(version) as fake:
        layer = Layer("fp8_tensor", on_input=True)
        layer.prepare()
        layer(*layer.tokens())
        assert fake.calls == [] and "needs FlashInfer 0.6.18" in said_of(layer).reason


def test_nothing_is_prepared_outside(b200):
    layer = Layer()
    layer(*layer.tokens())
    assert b200.calls == [] and tmoe.prepared() == []
    assert said_of(layer).reason.startswith("its weights aren't prepared")
    with tmoe.options(backend=TRTLLM), pytest.raises(tmoe.NoBackendError, match="aren't prepared"):
        layer(*layer.tokens())


def test_weights_are_prepared_once(b200, monkeypatch):
    layer = Layer("nvfp4")
    layer.prepare()
    (entry,) = tmoe.prepared()
    assert entry.backend == TRTLLM and "nvfp4" in str(entry)
    assert entry.num_bytes >= sum(w.nbytes for w in layer.weights)
    monkeypatch.setattr(flashinfer_backend.FlashInferBackend, "prepare", None)
    for _ in range(2):
        layer.prepare()
        layer(*layer.tokens())
    assert tmoe.prepared() == [entry]


def test_what_was_prepared_goes_with_the_layer(b200):
    layer, other = Layer(), Layer()
    layer.prepare()
    other.prepare()
    of_layer, of_other = (weakref.ref(entry.value.tensors()[0]) for entry in tmoe.prepared())
    b200.calls.clear()
    del layer
    gc.collect()
    assert len(tmoe.prepared()) == 1 and of_layer() is None
    tmoe.release(CUTLASS)
    assert len(tmoe.prepared()) == 1
    tmoe.release()
    gc.collect()
    assert of_other() is None
    assert tmoe.prepared() == [] and not prepared._held
    other(*other.tokens())


@pytest.mark.parametrize(
    ("scheme", "written"),
    [(None, "gate_up"), (None, "down"), (None, "bias"), ("mxfp4_a8", "gate_up")],
)
def test_weights_that_change_are_not_used_as_they_were(scheme, written, b200):
    layer, other = (Layer(scheme, OAI, bias=True) for _ in range(2))
    arguments = layer.tokens(1)
    with tmoe.options(backend=CUTLASS):
        layer.prepare()
        before = layer(*arguments)
    with torch.no_grad():
        layer.tensor(written).copy_(other.tensor(written))
    b200.calls.clear()
    with pytest.warns(UserWarning, match="written to after they were prepared"):
        after = layer(*arguments)
    assert b200.calls == [] and tmoe.prepared() == []
    with tmoe.options(backend="triton"):
        assert torch.equal(after, layer(*arguments))
    assert not torch.equal(before, after)
    with tmoe.options(backend=CUTLASS):
        layer.prepare()
        assert relative_error(layer(*arguments), after) < verify.BOUNDS["e4m3"] and b200.calls


def test_other_biases_with_the_same_weights(b200):
    layer = Layer(None, bias=True)
    layer.prepare()
    before = layer.keywords["down_bias"]
    layer.keywords["down_bias"] = before + 1
    b200.calls.clear()
    with pytest.warns(UserWarning, match="come with other biases or scales"):
        layer(*layer.tokens())
    assert b200.calls == []


def test_values_that_cannot_be_expressed(b200):
    """Input scales that differ between experts, whose inputs are quantised once."""
    layer = Layer("fp8_tensor")
    layer.keywords["input_scale"] = torch.linspace(0.01, 0.02, E)
    with pytest.warns(UserWarning, match="flashinfer_trtllm can't take these weights: .*input_sca"):
        layer.prepare()
    assert [call for call in b200.calls if call[0].startswith("trtllm")] == []


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


def test_verification_can_be_skipped(on):
    with on(faults={"weight_twice"}) as fake:
        layer = Layer()
        layer.prepare(verify=False)
        assert len(fake.calls) == 1 and len(tmoe.prepared()) == 1


@pytest.mark.parametrize("fastest", [TRTLLM, CUTLASS, "triton"])
def test_autotune_keeps_the_layout_of_the_fastest(fastest, b200, monkeypatch):
    def milliseconds(run, device_type):
        run()
        return 1.0 if run.args[0].name == fastest else 2.0

    monkeypatch.setattr(measure, "_milliseconds", milliseconds)
    layer, second = Layer(), Layer()
    for each in (layer, second):
        with tmoe.autotune(), tmoe.options(verify=False):
            each(*each.tokens())
    assert {entry.backend for entry in tmoe.prepared()} == {fastest} - {"triton"}
    assert len(tmoe.prepared()) == (0 if fastest == "triton" else 2)
    b200.calls.clear()
    layer(*layer.tokens())
    assert bool(b200.calls) == (fastest != "triton")
    times = {c.name: c.timing for c in tmoe.explain(prepared_problem(layer)).candidates}
    assert times[fastest] == 1.0 and times[TRTLLM] in (1.0, 2.0)


def prepared_problem(layer):
    (asked,) = {entry.problem for entry in tmoe.prepared()} or {
        problem.Problem(
            "fused_experts", T, H, I, E, K, torch.bfloat16, Machine.of("cpu"), activation=SWIGLU
        )
    }
    return asked


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
