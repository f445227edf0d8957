"""Expert layers with quantised weights: the scheme's own arithmetic, in fp64, as the truth."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.reference import fused_experts_ref, quantized, quantized_experts_ref
from tmoe.formats import SCHEMES

E, T, K, H, I = 5, 9, 2, 160, 96  # neither H nor I a multiple of 128
# A GPU adds in one order; the interpreter's BLAS has another for every number of rows.
SAME = dict(rtol=0, atol=0) if torch.cuda.is_available() else dict(rtol=1e-2, atol=1e-2)


@pytest.fixture(autouse=True)
def on_device(device):
    with device:
        yield


@functools.cache
def make_weights(recipe, *, H=H, I=I):
    """The same ones each time. Quantisers have tests of their own; torch's is the quickest here."""
    torch.manual_seed(0)
    with tmoe.options(backend="torch"):
        return [
            quantized(torch.randn(shape) / math.sqrt(shape[2]), recipe)
            for shape in ((E, 2 * I, H), (E, H, I))
        ]


def make_inputs(dtype=torch.float32, H=H):
    torch.manual_seed(1)  # not the numbers of the weights, which may have been made before
    x = torch.randn(T, H).to(dtype)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    ids[0] = torch.tensor([0, 4])
    return x, torch.rand(T, K), ids


def truth(x, gate_up, down, weights, ids, scheme, **options):
    layer = (gate_up.dequantize(), down.dequantize())
    return quantized_experts_ref(x, *layer, weights, ids, scheme, **options)


def in_bf16(x, gate_up, down, weights, ids, **options):
    """What torch makes of the dequantised layer in bf16: its error is the measure of ours."""
    layer = [t.dequantize(torch.bfloat16) for t in (gate_up, down)]
    return fused_experts_ref(x.bfloat16(), *layer, weights, ids, dtype=torch.bfloat16, **options)


def check(y, layer, scheme, **options):
    """`y` is what the scheme makes of a layer (x, gate_up, down, weights, ids)."""
    assert_matches(y.float(), truth(*layer, scheme, **options), in_bf16(*layer))


CASES = [(name, recipe) for name, scheme in SCHEMES.items() for recipe in scheme.weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme, recipe", CASES, ids=lambda v: getattr(v, "words", v))
def test_every_scheme(scheme, recipe, dtype, backend):
    """QN11: every scale reaches the product; no result is a thousand times too large or zero."""
    gate_up, down = make_weights(recipe)
    x, weights, ids = make_inputs(dtype)
    if backend == "triton" and dtype == torch.float16:
        with pytest.raises(tmoe.NoBackendError, match="fp16 has no room"):
            tmoe.fused_experts(x, gate_up, down, weights, ids, scheme=scheme)
        return
    y = tmoe.fused_experts(x, gate_up, down, weights, ids, scheme=scheme)
    assert y.shape == x.shape and y.dtype == dtype
    want = truth(x, gate_up, down, weights, ids, scheme)
    assert_matches(y.float(), want, in_bf16(x, gate_up, down, weights, ids))
    assert float(y.norm() / want.norm()) == pytest.approx(1, abs=0.1)  # QN12: not zero against zero


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weight_on_input(scheme, backend):
    """SC09: the weight scales what is quantised, and is applied once."""
    gate_up, down = make_weights(SCHEMES[scheme].weights[0])
    x, weights, ids = make_inputs()
    weights = weights / 100
    y = tmoe.fused_experts(x, gate_up, down, weights, ids, scheme=scheme, weight_on_input=True)
    want = truth(x, gate_up, down, weights, ids, scheme, weight_on_input=True)
    naive = in_bf16(x, gate_up, down, weights, ids, weight_on_input=True)
    assert_matches(y, want, naive)


@pytest.mark.parametrize("H, I", [(32, 16), (48, 144), (272, 80)], ids=str)
@pytest.mark.parametrize("scheme", ["fp8_block", "mxfp4_a16", "mxfp4_a8", "nvfp4"])
def test_partial_blocks_and_tiles(scheme, H, I, backend):
    """SH01, SH03, SH12: slices of a tensor-parallel layer, narrower than a block of scales."""
    gate_up, down = make_weights(SCHEMES[scheme].weights[0], H=H, I=I)
    x, weights, ids = make_inputs(H=H)
    y = tmoe.fused_experts(x, gate_up, down, weights, ids, scheme=scheme)
    check(y, (x, gate_up, down, weights, ids), scheme)


@pytest.mark.parametrize(
    "scheme, recipe",
    [(name, recipe) for name in ("fp8_a16", "mxfp4_a16", "nvfp4_a16")
     for recipe in SCHEMES[name].weights],
    ids=lambda value: value if isinstance(value, str) else value.format.name,
)  # fmt: skip
def test_slices_of_experts_add_up(scheme, recipe, backend):
    """Tensor parallelism: half of each expert's columns on one rank, half on another, no copies."""
    gate_up, down = make_weights(recipe, H=48, I=256)
    x, weights, ids = make_inputs(H=48)
    whole = tmoe.fused_experts(x, gate_up, down, weights, ids, scheme=scheme)
    gate, up = gate_up.chunk(2, dim=1)
    parts = [
        tmoe.fused_experts(
            x, torch.cat([gate[:, i : i + 128], up[:, i : i + 128]], 1), down[..., i : i + 128],
            weights, ids, scheme=scheme,
        )
        for i in (0, 128)
    ]  # fmt: skip
    assert (sum(parts) - whole).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize("scheme", ["fp8_tensor", "nvfp4"])
def test_static_scales_next_to_zero(scheme, backend):
    """QN03: an expert whose scale is good for nothing harms no other, and stays finite."""
    gate_up, down = make_weights(SCHEMES[scheme].weights[0])
    x, weights, ids = make_inputs()
    good = torch.full((E,), 0.02)
    bad = torch.tensor([0.02, 0.0, 1e-40, 1.2e-38, 0.02])
    want, y = (
        tmoe.fused_experts(
            x, gate_up, down, weights, ids, scheme=scheme, input_scale=scale, hidden_scale=scale
        )
        for scale in (good, bad)
    )
    unharmed = ((ids == 0) | (ids == 4)).all(1)
    assert y.isfinite().all() and torch.equal(y[unharmed], want[unharmed])


def test_inputs_are_quantised_only_where_the_scheme_says_so(backend):
    """QN22: what was asked for is what runs."""
    gate_up, down = make_weights(SCHEMES["fp8_block"].weights[0])
    x, weights, ids = make_inputs()
    a8 = tmoe.fused_experts(x, gate_up, down, weights, ids, scheme="fp8_block")
    a16 = tmoe.fused_experts(x, gate_up, down, weights, ids, scheme="fp8_a16")
    layer = [t.dequantize() for t in (gate_up, down)]
    exact = fused_experts_ref(x, *layer, weights, ids)
    assert (a16 - exact).norm() < 1e-5 * exact.norm() < (a8 - exact).norm()


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_a16", "nvfp4", "nvfp4_a16"])
def test_gate_and_up_that_were_quantised_apart(scheme, backend):
    """Each keeps its own scale (fp8_tensor) or global scale (nvfp4); nothing is rounded again."""
    recipe = SCHEMES[scheme].weights[0]
    halves = 0.001 * (1 + torch.rand(E, 2)) * torch.tensor([1.0, 7.0])
    given = {"global_scale" if recipe.format.has_global_scale else "scale": halves}
    gate_up = torch.randn(E, 2 * I, H) / math.sqrt(H)
    gate_up[:, I:] *= 7
    gate_up, down = tmoe.quantize(gate_up, recipe.format.name, **given), make_weights(recipe)[1]
    x, weights, ids = make_inputs()
    y = tmoe.fused_experts(x, gate_up, down, weights, ids, scheme=scheme)
    check(y, (x, gate_up, down, weights, ids), scheme)


@pytest.mark.parametrize("scheme", ["fp8_tensor", "nvfp4"])
def test_static_scales(scheme, backend):
    """One number for all experts, or (QN21) each expert its own."""
    gate_up, down = make_weights(SCHEMES[scheme].weights[0])
    x, weights, ids = make_inputs()
    scales = torch.tensor(0.02), torch.tensor(0.03)
    static = dict(input_scale=scales[0], hidden_scale=scales[1])
    y = tmoe.fused_experts(x, gate_up, down, weights, ids, scheme=scheme, **static)
    check(y, (x, gate_up, down, weights, ids), scheme, **static)
    alike = tmoe.fused_experts(
        x, gate_up, down, weights, ids, scheme=scheme,
        input_scale=scales[0].expand(E), hidden_scale=scales[1].expand(E),
    )  # fmt: skip
    assert torch.equal(alike, y)
    of_one = x, gate_up[:1], down[:1], weights[:, :1], torch.zeros(T, 1, dtype=torch.int64)
    number, list_of_one = (
        tmoe.fused_experts(*of_one, scheme=scheme, input_scale=i, hidden_scale=h)
        for i, h in (scales, [scale.view(1) for scale in scales])
    )
    assert torch.equal(list_of_one, number)
    one = torch.tensor([0.02, 0.1, 0.5, 0.02, 0.01])
    y = tmoe.fused_experts(
        x, gate_up, down, weights, ids, scheme=scheme, input_scale=one, hidden_scale=one
    )
    for e in range(E):
        only = ids.masked_fill(ids != e, -1)
        alone = tmoe.fused_experts(
            x, gate_up, down, weights, only, scheme=scheme,
            input_scale=one[e], hidden_scale=one[e],
        )  # fmt: skip
        y = y - alone
    torch.testing.assert_close(y, torch.zeros_like(y), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_windows_of_experts_add_up(scheme, backend):
    """Rows of experts that aren't here contribute nothing, and may hold anything."""
    gate_up, down = make_weights(SCHEMES[scheme].weights[0])
    x, weights, ids = make_inputs()
    scales = {}
    if SCHEMES[scheme].takes_scales:  # a dynamic one is that of the rows that are here
        scales = dict(input_scale=torch.tensor(0.02), hidden_scale=torch.tensor(0.02))
    whole = tmoe.fused_experts(x, gate_up, down, weights, ids, scheme=scheme, **scales)
    parts = [
        tmoe.fused_experts(
            x, gate_up[a:b], down[a:b], weights, ids,
            scheme=scheme, first_expert=a, num_experts=E, **scales,
        )
        for a, b in ((0, 2), (2, E))
    ]  # fmt: skip
    torch.testing.assert_close(sum(parts), whole)
    x[3], ids[3] = math.nan, -1
    y = tmoe.fused_experts(x, gate_up, down, weights, ids, scheme=scheme, **scales)
    assert torch.equal(y[3], torch.zeros(H)) and y.isfinite().all()


def test_biases_activations_and_out(backend):
    gate_up, down = make_weights(SCHEMES["mxfp4_a16"].weights[0])
    x, weights, ids = make_inputs()
    biases = dict(gate_up_bias=torch.randn(E, 2 * I), down_bias=torch.randn(E, H))
    options = dict(activation="swiglu_oai", interleaved=True, **biases)
    out = torch.empty_like(x)
    y = tmoe.fused_experts(x, gate_up, down, weights, ids, scheme="mxfp4_a16", out=out, **options)
    assert y is out
    layer = [t.dequantize() for t in (gate_up, down)]
    options |= dict(activation="swiglu_oai", alpha=1.702, limit=7.0)
    want = fused_experts_ref(x, *layer, weights, ids, **options)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_token_does_not_depend_on_its_batch(scheme):
    """DT01: with the option that says so. A scale of all rows has to be given then."""
    gate_up, down = make_weights(SCHEMES[scheme].weights[0])
    x, weights, ids = make_inputs(torch.bfloat16)
    scales = {}
    if SCHEMES[scheme].takes_scales:
        scales = dict.fromkeys(("input_scale", "hidden_scale"), torch.tensor(0.02))

    def run(t, **scales):
        with tmoe.options(backend="triton", batch_invariant=True):
            return tmoe.fused_experts(
                x[t], gate_up, down, weights[t], ids[t], scheme=scheme, **scales
            )

    whole = run(slice(None), **scales)
    for t in (slice(0, 1), slice(4, 5), slice(2, 9)):
        torch.testing.assert_close(run(t, **scales), whole[t], **SAME)
    if scales:
        with pytest.raises(ValueError, match="input_scale must be given .* batch_invariant"):
            run(slice(None))


def test_no_tokens(backend):
    gate_up, down = make_weights(SCHEMES["fp8_block"].weights[0])
    ids = torch.zeros(0, K, dtype=torch.int64)
    y = tmoe.fused_experts(
        torch.randn(0, H), gate_up, down, torch.rand(0, K), ids, scheme="fp8_block"
    )
    assert y.shape == (0, H)


def test_compiles(backend):
    gate_up, down = make_weights(SCHEMES["fp8_block"].weights[0])
    x, weights, ids = make_inputs()

    def layer(x):
        return tmoe.fused_experts(x, gate_up, down, weights, ids, scheme="fp8_block")

    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def refused(error, match, *, scheme="fp8_block", **changes):
    gate_up, down = make_weights(SCHEMES["fp8_block"].weights[0])
    x, weights, ids = make_inputs()
    arguments = dict(
        x=x, gate_up_proj=gate_up, down_proj=down, topk_weights=weights, topk_ids=ids, scheme=scheme
    )
    with pytest.raises(error, match=match):
        tmoe.fused_experts(**arguments | changes)


def test_bad_input():
    """A scheme is never guessed, never half applied, and never a silent dequantisation."""
    other = make_weights(SCHEMES["mxfp4_a16"].weights[0])
    refused(ValueError, "scheme must be named .* one of fp8_block, fp8_a16, got None", scheme=None)
    refused(ValueError, "scheme must be one of fp8_tensor,.*got int3", scheme="int3")
    refused(
        ValueError,
        r"gate_up_proj must be mxfp4 .* for mxfp4_a16, got fp8_block",
        scheme="mxfp4_a16",
    )
    refused(ValueError, r"down_proj must be fp8_block .*got mxfp4", down_proj=other[1])
    refused(
        TypeError, "down_proj must be a QuantizedTensor, got Tensor", down_proj=torch.randn(E, H, I)
    )
    refused(ValueError, "input_scale must be None for fp8_block", input_scale=torch.tensor(1.0))
    refused(TypeError, "x must have dtype", x=torch.randn(T, H, dtype=torch.float64))
    with pytest.raises(ValueError, match="fp8_block takes weights from tmoe.quantize"):
        weights = [w.dequantize() for w in make_weights(SCHEMES["fp8_block"].weights[0])]
        tmoe.fused_experts(torch.randn(T, H), *weights, *make_inputs()[1:], scheme="fp8_block")
    gate_up, down = make_weights(SCHEMES["fp8_tensor"].weights[0])
    with pytest.raises(ValueError, match=r"input_scale must be one number, or of shape \(5,\)"):
        x, w, ids = make_inputs()
        scale = torch.ones(3)
        tmoe.fused_experts(x, gate_up, down, w, ids, scheme="fp8_tensor", input_scale=scale)
