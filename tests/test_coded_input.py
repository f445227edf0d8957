"""Experts of rows that were quantised before: the bits of quantising them in the layer."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import tmoe
from tests.reference import quantized
from tmoe.formats import SCHEMES
from tmoe.kernels.sort import sort_tokens
from tmoe.kernels.spread_codes import spread_codes, spread_codes_ref
from tmoe.library import operator

E, T, K, H, I = 5, 9, 2, 160, 96
CODED = [name for name, scheme in SCHEMES.items() if scheme.inputs]


@pytest.fixture(autouse=True)
def on_device(device):
    with device:
        yield


def make(scheme, dtype=torch.bfloat16):
    recipe = SCHEMES[scheme].weights[0]
    shapes = (E, 2 * I, H), (E, H, I)
    gate_up, down = (quantized(torch.randn(s) / math.sqrt(s[2]), recipe) for s in shapes)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    ids[0, 0], ids[1] = -1, -1
    return torch.randn(T, H).to(dtype), gate_up, down, torch.rand(T, K), ids


def scales_of(scheme):
    """Static ones, where there would be one dynamic scale for all rows."""
    if not SCHEMES[scheme].takes_scales:
        return None, None
    most = 6 * 448 if scheme == "nvfp4" else 448
    return torch.tensor(4 / most), torch.tensor(20 / most)


def code(x, scheme, scale):
    recipe = SCHEMES[scheme].inputs
    given = {} if scale is None else {"scale": scale}
    if recipe.format.has_global_scale:
        given = {"global_scale": scale}
    elif not given:
        given = {"scale_rule": recipe.scale_rule}
    return tmoe.quantize(x, recipe.format.name, block_shape=recipe.block_shape, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", CODED)
def test_the_bits_of_quantising_in_the_layer(scheme, dtype, backend):
    x, *layer = make(scheme, dtype)
    scale, hidden_scale = scales_of(scheme)
    options = {"scheme": scheme, "hidden_scale": hidden_scale, "out_dtype": torch.float32}
    want = tmoe.fused_experts(x, *layer, input_scale=scale, **options)
    got = tmoe.fused_experts(code(x, scheme, scale), *layer, **options)
    assert got.dtype == torch.float32 and got.abs().max() > 0
    assert torch.equal(got, want)
    options.pop("out_dtype")
    assert tmoe.fused_experts(code(x, scheme, scale), *layer, **options).dtype == dtype


def test_no_token(backend):
    x, *layer, weights, ids = make("fp8_block")
    q = code(x[:0], "fp8_block", None)
    y = tmoe.fused_experts(q, *layer, weights[:0], ids[:0], scheme="fp8_block")
    assert y.shape == (0, H)


def test_what_is_refused():
    x, *layer = make("fp8_block")
    q = code(x, "fp8_block", None)
    run = tmoe.fused_experts
    with pytest.raises(ValueError, match=r"x must be fp8_block \(1, 128\) .*got fp8_token"):
        run(tmoe.quantize(x, "fp8_token"), *layer, scheme="fp8_block")
    with pytest.raises(ValueError, match="x must be not quantised: fp8_a16 takes its inputs as"):
        run(q, *layer, scheme="fp8_a16")
    with pytest.raises(ValueError, match="weight_on_input must be False for x that is quantised"):
        run(q, *layer, scheme="fp8_block", weight_on_input=True)
    with pytest.raises(ValueError, match="out must be None for x that is quantised"):
        run(q, *layer, scheme="fp8_block", out=torch.empty_like(x))
    weights = layer[2].requires_grad_()
    with pytest.raises(tmoe.NoBackendError, match="gradients are needed"):
        run(q, *layer[:2], weights, layer[3], scheme="fp8_block")


@pytest.mark.parametrize("wide", [False, True])
def test_what_compilers_are_told_of_the_result(wide):
    x, gate_up, down, weights, ids = make("fp8_block")
    codes, *scales = code(x, "fp8_block", None).parts()
    args = (codes, scales, torch.bfloat16, gate_up.parts(), down.parts(), weights, ids, None, None,
            None, None, "fp8_block", "fp8_block", 1, "swiglu", 1.0, math.inf, False, False, 0, E,
            wide, False)  # fmt: skip
    op = operator("coded_experts")
    y = op(*args)
    with FakeTensorMode() as mode:
        told = op(*tree_map_only(torch.Tensor, mode.from_tensor, args))
    assert (told.shape, told.dtype, told.device) == (y.shape, y.dtype, y.device)
    assert y.dtype == (torch.float32 if wide else torch.bfloat16)


@pytest.mark.parametrize("D", [256, 130, 33])
def test_rows_in_the_order_of_their_experts(D):
    """Those of experts elsewhere, and what follows the last row, are left alone."""
    q = code(torch.randn(T, D), "fp8_block", None)
    ids = make("fp8_block")[-1]
    order = sort_tokens(ids, num_experts=E - 1, block_m=16)
    codes, scale = spread_codes(q.data, q.scale, order.slot_to_row)
    rows, want, want_scale = spread_codes_ref(q.data, q.scale, order.slot_to_row)
    assert len(rows) < T * K and sorted(rows.tolist()) == list(range(len(rows)))
    assert torch.equal(codes.view(torch.uint8)[rows], want)
    assert torch.equal(scale[rows], want_scale)
    assert scale.T.is_contiguous() and scale[len(rows) :].isnan().all()
