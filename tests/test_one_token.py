"""A single token through the experts: its rows aren't sorted, and nothing else may differ."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tmoe
import tmoe.kernels.replay as replay
from tests.checking import assert_matches
from tests.reference import fused_experts_ref, quantized, quantized_experts_ref
from tmoe.backends import triton_inputs
from tmoe.formats import SCHEMES
from tmoe.kernels.tiles import LayerTiles, Tile

E, K, H, I, FIRST = 4, 3, 160, 96, 2
IDS = {
    "all local": [5, 2, 4],
    "one twice": [3, 3, 2],
    "others are elsewhere": [6, 4, 1],
    "none": [0, 7, -1],
    "far outside": [2**32 + 3, 3, -(2**63)],
}
SCHEME_NAMES = ["bf16", *SCHEMES]


@pytest.fixture(autouse=True)
def on_device(device):
    with device, tmoe.options(backend="triton"):
        yield


def layer(scheme: str, dtype: torch.dtype = torch.bfloat16) -> list:
    """x, gate_up_proj, down_proj, topk_weights"""
    w1, w2 = torch.randn(E, 2 * I, H) / math.sqrt(H), torch.randn(E, H, I) / math.sqrt(I)
    if scheme == "bf16":
        w1, w2 = w1.to(dtype), w2.to(dtype)
    else:
        w1, w2 = (quantized(w, SCHEMES[scheme].weights[0]) for w in (w1, w2))
    return [torch.randn(1, H).to(dtype), w1, w2, torch.rand(1, K)]


def run(layer: list, ids: Tensor, scheme: str, **options) -> Tensor:
    options |= {} if scheme == "bf16" else {"scheme": scheme}
    return tmoe.fused_experts(*layer, ids, first_expert=FIRST, num_experts=E + 4, **options)


def sorted_run(monkeypatch, *args, **options) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(LayerTiles, "take_one_token", False)
        return run(*args, **options)


@pytest.mark.parametrize("which", IDS)
@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_right_and_the_bits_of_a_sorted_token(scheme, which, monkeypatch):
    """A slot without a local expert has a row of NaN here, which nothing may read."""
    given, ids = layer(scheme), torch.tensor([IDS[which]])
    y = run(given, ids, scheme)
    assert torch.equal(y, sorted_run(monkeypatch, given, ids, scheme))
    x, w1, w2, weights = given
    ids = torch.where((ids >= FIRST) & (ids < FIRST + E), ids - FIRST, -1)
    if scheme == "bf16":
        want = fused_experts_ref(*given, ids)
    else:
        want = quantized_experts_ref(x, w1.dequantize(), w2.dequantize(), weights, ids, scheme)
        w1, w2 = w1.dequantize(torch.bfloat16), w2.dequantize(torch.bfloat16)
    in_bf16 = fused_experts_ref(x, w1, w2, weights, ids, dtype=torch.bfloat16)
    assert_matches(y.float(), want, in_bf16)
    assert (which != "none") == bool(y.any())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_of_any_strides(dtype):
    given = layer("bf16")
    wide = torch.full((3, 9), 99, dtype=dtype)
    wide[1, 1:7:2] = torch.tensor(IDS["all local"])
    ids = wide[1:2, 1:7:2]
    assert torch.equal(run(given, ids, "bf16"), run(given, ids.contiguous(), "bf16"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"activation": "swiglu_oai", "interleaved": True},
        {"weight_on_input": True},
        {"out_dtype": torch.float32},
    ],
    ids=str,
)
def test_options_of_a_layer(options, dtype, monkeypatch):
    given, ids = layer("bf16", dtype), torch.tensor([IDS["others are elsewhere"]])
    options = options | {"gate_up_bias": torch.randn(E, 2 * I, dtype=dtype)}
    options |= {"down_bias": torch.randn(E, H, dtype=dtype)}
    y = run(given, ids, "bf16", **options)
    assert y.isfinite().all()
    assert torch.equal(y, sorted_run(monkeypatch, given, ids, "bf16", **options))


@pytest.mark.parametrize("scales", ["none", "one", "of experts", "of the input"])
@pytest.mark.parametrize("scheme", ["fp8_tensor", "nvfp4"])
def test_scales_of_all_rows(scheme, scales, monkeypatch):
    """A dynamic one is that of rows that exist; a static one may be each expert's."""
    given, ids = layer(scheme), torch.tensor([IDS["others are elsewhere"]])
    one = torch.tensor(0.02)
    each = torch.linspace(0.01, 0.03, E)
    options = {
        "none": {},
        "one": {"input_scale": one, "hidden_scale": one},
        "of experts": {"input_scale": each, "hidden_scale": each},
        "of the input": {"input_scale": one},
    }[scales]
    y = run(given, ids, scheme, **options)
    assert y.isfinite().all() and y.any()
    assert torch.equal(y, sorted_run(monkeypatch, given, ids, scheme, **options))


@pytest.mark.parametrize("scheme", ["bf16", "fp8_tensor", "fp8_channel", "fp8_block"])
def test_a_weighted_input(scheme, monkeypatch):
    given, ids = layer(scheme), torch.tensor([IDS["one twice"]])
    y = run(given, ids, scheme, weight_on_input=True)
    assert torch.equal(y, sorted_run(monkeypatch, given, ids, scheme, weight_on_input=True))


def test_nothing_is_sorted(monkeypatch):
    def no_sort(*args, **kwargs):
        raise AssertionError("sorted")

    monkeypatch.setattr(replay, "TRITON_IS_KNOWN", False)  # a replay would ask nobody
    monkeypatch.setattr(triton_inputs, "sort_tokens", no_sort)
    given, ids = layer("bf16"), torch.tensor([IDS["all local"]])
    assert run(given, ids, "bf16").any()
    two = [given[0].repeat(2, 1), *given[1:3], given[3].repeat(2, 1)]
    with pytest.raises(AssertionError, match="sorted"):
        run(two, ids.repeat(2, 1), "bf16")


def test_gradients():
    """Rows are kept for a backward, which sorts."""
    given, ids = layer("bf16", torch.float32), torch.tensor([IDS["others are elsewhere"]])
    for tensor in given:
        tensor.requires_grad_()
    run(given, ids, "bf16").square().sum().backward()
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    fused_experts_ref(*leaves, ids, first_expert=FIRST).square().sum().backward()
    for got, want in zip(given, leaves, strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-4)


def test_which_tiles_take_it():
    plain = Tile(16, 16, 32, 4, 2)
    persistent, specialized = (
        Tile(16, 16, 32, 4, 2, **{what: True}) for what in ("persistent", "specialized")
    )
    assert LayerTiles(plain, plain).take_one_token
    for other in (persistent, specialized):
        assert not LayerTiles(plain, other).take_one_token
        assert not LayerTiles(other, plain).take_one_token
