"""Weights in FlashInfer's layouts: made once, inside `prepare`, and dropped when they change."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import tmoe
from tests.backends.flashinfer.layers import (
    CUTLASS,
    OAI,
    TRTLLM,
    E,
    Layer,
    problem_of,
    relative_error,
    said_of,
)
from tmoe.backends.flashinfer import backend as flashinfer_backend
from tmoe.dispatch import measure, prepared, verify


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


def test_what_preparing_meets_does_not_end_a_call(on, monkeypatch):
    def no_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with on():
        layer = Layer()
        monkeypatch.setattr(flashinfer_backend.FlashInferBackend, "prepare", no_memory)
        with pytest.warns(UserWarning, match="can't take these weights: CUDA out of memory"):
            y = layer.prepare()
        assert y.isfinite().all() and tmoe.prepared() == []


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
    times = {c.name: c.timing for c in tmoe.explain(problem_of(layer)).candidates}
    assert times[fastest] == 1.0 and times[TRTLLM] in (1.0, 2.0)
