"""Gradients through frozen quantised experts, and of low-rank adapters on any experts."""

from __future__ import annotations

import math

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.nn.test_training import SPREAD
from tests.reference import quantized, rounded
from tmoe.formats import SCHEMES

E, T, K, H, I, RANK = 4, 6, 2, 48, 32, 4
CASES = [(name, recipe) for name, scheme in SCHEMES.items() for recipe in scheme.weights]


@pytest.fixture(autouse=True)
def where_kernels_run(device):
    """Tensors are made there."""
    with device:
        yield


def straight(rows, recipe):
    """The values of a format, with the gradient of what was rounded."""
    return rows + (rounded(rows.detach(), recipe).to(rows.dtype) - rows).detach()


def reference(leaves, weights, ids, recipe, *, weight_on_input=False, dtype=torch.float64):
    """All slots at once, in `dtype`; `weights` are dequantised."""
    given = {name: leaf.to(dtype) for name, leaf in leaves.items()}
    gate_up, down = (weight.to(dtype) for weight in weights)
    e, slot_weights = ids.flatten(), given["topk_weights"].reshape(-1, 1)
    rows = given["x"].repeat_interleave(K, 0)
    if weight_on_input:
        rows = rows * slot_weights

    def project(rows, weight, name):
        y = torch.einsum("sd,snd->sn", straight(rows, recipe), weight[e])
        if f"{name}_a" in given:  # adapters multiply what was not rounded
            low = torch.einsum("sd,srd->sr", rows, given[f"{name}_a"][e])
            y = y + torch.einsum("sr,snr->sn", low, given[f"{name}_b"][e]) * 0.5
        return y + given[f"{name}_bias"][e]

    gate, up = project(rows, gate_up, "gate_up").chunk(2, -1)
    y = project(gate * gate.sigmoid() * up, down, "down")
    y = y if weight_on_input else y * slot_weights
    return y.view(T, K, H).sum(1)


def make(dtype, *, lora):
    leaves = {
        "x": torch.randn(T, H).to(dtype),
        "topk_weights": torch.rand(T, K),
        "gate_up_bias": torch.randn(E, 2 * I).to(dtype),
        "down_bias": torch.randn(E, H).to(dtype),
    }
    if lora:
        leaves["gate_up_a"] = torch.randn(E, RANK, H) / math.sqrt(H)
        leaves["gate_up_b"] = torch.randn(E, 2 * I, RANK) / 2
        leaves["down_a"] = torch.randn(E, RANK, I) / math.sqrt(I)
        leaves["down_b"] = torch.randn(E, H, RANK) / 2
    ids = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)])  # the last one has no token
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}, ids


def run(leaves, weights, ids, **options):
    pairs = {}
    for name in ("gate_up", "down"):
        if f"{name}_a" in leaves:
            pair = (leaves[f"{name}_a"], leaves[f"{name}_b"])
            pairs[f"{name}_lora"] = tmoe.LowRank(*pair, 0.5)
    given = {name: leaf for name, leaf in leaves.items() if not name.endswith(("_a", "_b"))}
    x, topk_weights = given.pop("x"), given.pop("topk_weights")
    return tmoe.fused_experts(x, *weights, topk_weights, ids, **given, **pairs, **options)


def gradients(y, leaves):
    found = torch.autograd.grad(y.double().square().sum(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def dtype_for(scheme):
    """A rounding to bf16 can flip a code of the inputs, in either of two ways of doing the same."""
    rounds = scheme is not None and SCHEMES[scheme].inputs is not None
    return torch.float32 if rounds else torch.bfloat16


def check(scheme, recipe, dtype, *, lora, weight_on_input=False):
    weights = [torch.randn(E, 2 * I, H) / math.sqrt(H), torch.randn(E, H, I) / math.sqrt(I)]
    weights = weights if recipe is None else [quantized(w, recipe) for w in weights]
    leaves, ids = make(dtype, lora=lora)
    y = run(
        leaves, [w if recipe else w.to(dtype) for w in weights], ids,
        scheme=scheme, weight_on_input=weight_on_input,
    )  # fmt: skip
    numbers = [w.dequantize() if recipe else w.to(dtype).float() for w in weights]
    inputs = SCHEMES[scheme].inputs if scheme else None
    options = {"weight_on_input": weight_on_input}
    truth = reference(leaves, numbers, ids, inputs, **options)
    naive = reference(leaves, numbers, ids, inputs, **options, dtype=torch.bfloat16)
    assert_matches(y.detach().double(), truth.detach(), naive.detach())
    got, want, other = (gradients(y, leaves) for y in (y, truth, naive))
    for name, leaf in leaves.items():
        assert got[name].dtype == leaf.dtype
        assert_matches(got[name].double(), want[name].double(), other[name], factor=SPREAD)
        if got[name].shape[0] == E:
            assert not got[name][E - 1].any() and got[name][0].any(), name


@pytest.mark.parametrize("scheme, recipe", CASES, ids=lambda v: getattr(v, "words", v))
def test_through_frozen_weights(scheme, recipe, backend):
    check(scheme, recipe, dtype_for(scheme), lora=False)


@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("scheme", [None, "fp8_tensor", "fp8_block", "mxfp4_a16", "nvfp4"])
def test_adapters(scheme, weight_on_input, backend):
    recipe = None if scheme is None else SCHEMES[scheme].weights[0]
    check(scheme, recipe, dtype_for(scheme), lora=True, weight_on_input=weight_on_input)


@pytest.mark.parametrize("scheme", [None, "nvfp4_a16"])
def test_one_projection_alone(scheme, backend):
    """No adapter means no product for it, and no gradient."""
    weights = [torch.randn(E, 2 * I, H) / math.sqrt(H), torch.randn(E, H, I) / math.sqrt(I)]
    numbers = weights
    if scheme is not None:
        weights = [quantized(w, SCHEMES[scheme].weights[0]) for w in weights]
        numbers = [w.dequantize() for w in weights]
    for alone in ("gate_up", "down"):
        leaves, ids = make(torch.float32, lora=True)
        leaves = {n: v for n, v in leaves.items() if n[-2:] not in ("_a", "_b") or alone in n}
        y = run(leaves, weights, ids, scheme=scheme)
        want = reference(leaves, numbers, ids, None)
        torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)
        for name, gradient in gradients(y, leaves).items():
            true = gradients(want, leaves)[name]
            torch.testing.assert_close(gradient, true, rtol=1e-3, atol=1e-3)
            want = reference(leaves, numbers, ids, None)


def test_dropped_slots_and_no_tokens(backend):
    """Ids of experts that aren't here: their rows get no gradient, whatever they hold."""
    weights = [quantized(torch.randn(E, 2 * I, H), SCHEMES["fp8_a16"].weights[0]),
               quantized(torch.randn(E, H, I), SCHEMES["fp8_a16"].weights[0])]  # fmt: skip
    leaves, ids = make(torch.float32, lora=True)
    ids[3], ids[4, 1] = -1, E
    with torch.no_grad():
        leaves["x"][3] = float("nan")
        leaves["topk_weights"][4, 1] = float("nan")
    got = gradients(run(leaves, weights, ids, scheme="fp8_a16"), leaves)
    assert all(gradient.isfinite().all() for gradient in got.values())
    assert not got["x"][3].any() and got["topk_weights"][4, 1] == 0
    none = {n: v[:0].detach().requires_grad_() if n in ("x", "topk_weights") else v
            for n, v in leaves.items()}  # fmt: skip
    got = gradients(run(none, weights, ids[:0], scheme="fp8_a16"), none)
    assert all(not gradient.any() for gradient in got.values())


def test_codes_of_the_input(backend):
    """They have no gradient: neither with adapters, nor with anything else that needs one."""
    weights = [quantized(torch.randn(shape), SCHEMES["fp8_block"].weights[0])
               for shape in ((E, 2 * I, H), (E, H, I))]  # fmt: skip
    x = quantized(torch.randn(T, H), SCHEMES["fp8_block"].inputs)
    ids, topk_weights = torch.zeros(T, K, dtype=torch.int32), torch.rand(T, K)
    lora = tmoe.LowRank(torch.randn(E, RANK, H), torch.randn(E, 2 * I, RANK))
    arguments = (x, *weights, topk_weights, ids)
    with pytest.raises(ValueError, match="x must be plain where there are adapters"):
        tmoe.fused_experts(*arguments, scheme="fp8_block", gate_up_lora=lora)
    topk_weights.requires_grad_()
    with pytest.raises(tmoe.NoBackendError, match="quantised already has no backward"):
        tmoe.fused_experts(*arguments, scheme="fp8_block")


def test_a_partial_sum_in_fp32(backend):
    """Of one rank of several: the result isn't rounded, and its gradient comes in fp32."""
    weights = [quantized(torch.randn(E, 2 * I, H) / 8, SCHEMES["fp8_a16"].weights[0]),
               quantized(torch.randn(E, H, I) / 8, SCHEMES["fp8_a16"].weights[0])]  # fmt: skip
    leaves, ids = make(torch.bfloat16, lora=True)
    y = run(leaves, weights, ids, scheme="fp8_a16", out_dtype=torch.float32)
    assert y.dtype == torch.float32
    got = gradients(y, leaves)
    want = gradients(run(leaves, weights, ids, scheme="fp8_a16"), leaves)
    for name, leaf in leaves.items():
        assert got[name].dtype == leaf.dtype
        torch.testing.assert_close(
            got[name], want[name], rtol=0.05, atol=0.05 * want[name].abs().max().item()
        )
