"""A result that isn't Triton's keeps a layer on Triton; `layers.py` says what is compared where."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import tmoe
from tests.backends.flashinfer.layers import (
    CUTLASS,
    OAI,
    SWIGLU,
    TRTLLM,
    Layer,
    relative_error,
    said_of,
)
from tmoe.dispatch import verify

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


@pytest.mark.parametrize("version", ["0.6.8", "0.6.12", "0.6.15", "0.6.16"])
def test_old_versions_are_never_called(version, on):
    with on(version) as fake:
        layer = Layer("fp8_tensor", on_input=True)
        layer.prepare()
        layer(*layer.tokens())
        assert fake.calls == [] and "needs FlashInfer 0.6.18" in said_of(layer).reason


def test_verification_can_be_skipped(on):
    with on(faults={"weight_twice"}) as fake:
        layer = Layer()
        layer.prepare(verify=False)
        assert len(fake.calls) == 1 and len(tmoe.prepared()) == 1
