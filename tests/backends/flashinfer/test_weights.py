"""Weights prepared for FlashInfer: a layer computed by hand, in fp64, from what each recipe makes.

The stand-in's reading of them undoes the layouts and imitates the kernels.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tmoe
from tests.backends.flashinfer.cases import (
    A1,
    A2,
    ACTIVATION_TYPES,
    CASES,
    LAYERS,
    LIMITED,
    OAI,
    OF,
    RELU2,
    STEP,
    SWIGLU,
    Case,
    dequantized,
    make,
    prepared,
    recipes,
)
from tests.backends.flashinfer.stand_in import reading, undo
from tests.backends.flashinfer.stand_in.kernel import Kernel
from tmoe.activation import Activation
from tmoe.backends.flashinfer import cutlass_weights
from tmoe.backends.flashinfer.layer import Sizes
from tmoe.dispatch.prepared import ExpertWeights
from tmoe.formats import QuantizedTensor

E, T = 3, 5


def kernel_of(case: Case, made, activation: Activation) -> Kernel:
    """Its input is x, unless x is in steps of a static scale."""
    name = ACTIVATION_TYPES[activation.name]
    if "trtllm" in case.recipe:
        kernel = reading.of_trtllm(made.keywords(), case.format, name)
        return replace(kernel, input=1 / A1) if case.format in ("fp8_tensor", "nvfp4") else kernel
    kernel = reading.of_cutlass(made.keywords(), case.format, name)
    return replace(kernel, input=1 / made.quant_scales[3]) if "tensor" in case.format else kernel


def assert_same_layer(kernel: Kernel, experts: ExpertWeights) -> None:
    H = experts.down_proj.shape[1]
    x = torch.randn(T, H, dtype=torch.float64)
    filled = F.pad(x, (0, kernel.gate_up.shape[-1] - H))
    got = torch.stack([kernel.expert(e, filled) for e in range(E)])
    want = dequantized(experts, x)
    assert (got[..., H:] == 0).all()
    error = (got[..., :H] - want).abs().amax((1, 2)) / want.abs().amax((1, 2))
    assert error.max() < 1e-6, error  # scalars are fp32


@pytest.mark.parametrize(("case", "activation", "bias", "interleaved"), LAYERS, ids=str)
def test_the_kernel_computes_the_layer(case, activation, bias, interleaved):
    """A wrong order, half, scalar or unit, or a factor applied twice, is far outside the bound."""
    experts = make(case, activation, bias, interleaved)
    made = prepared(case, experts)
    padded = (case.padded[0], case.padded[1] if activation.gated else case.ungated)
    assert made.sizes == Sizes(case.H, case.I, *padded)
    kernel = kernel_of(case, made, activation)
    assert kernel.down.shape == (E, *padded)
    assert_same_layer(kernel, experts)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_values_are_the_weights(case):
    """Dequantised, to the last bit; and what is filled up is 0."""
    experts = make(case, SWIGLU)
    kernel = kernel_of(case, prepared(case, experts), SWIGLU)
    pair = (experts.gate_up_proj, experts.down_proj)
    for got, w, halves in zip((kernel.gate_up, kernel.down), pair, (2, 1), strict=True):
        got, wanted = got.unflatten(1, (halves, -1)).float(), w
        if isinstance(w, QuantizedTensor):
            wanted = w.dequantize()
            scale = w.scale if case.format == "fp8_tensor" else w.global_scale
            got = got if scale is None else got * scale.view(-1, 1, 1, 1)
        wanted = wanted.float().unflatten(1, (halves, -1))
        filled = torch.zeros_like(got)
        filled[:, :, : wanted.shape[2], : wanted.shape[3]] = wanted
        # NVFP4's two scales meet each other before the code in `dequantize`.
        rtol = 2**-22 if case.format == "nvfp4" else 0
        torch.testing.assert_close(got, filled, rtol=rtol, atol=0)


@pytest.mark.parametrize("case", [c for c in CASES if c.bias or "fp8_t" in c.format], ids=str)
def test_the_comparison_sees_every_scalar(case):
    """It fails if any of them is off by a factor of 2, or the halves have changed places."""
    experts = make(case, OAI if OAI in case.activations else STEP, bias=case.bias)
    kernel = kernel_of(case, prepared(case, experts), experts.activation)
    assert_same_layer(kernel, experts)
    scalars = ("input", "first", "hidden", "second")
    wrong = [{n: 2.0 if (value := getattr(kernel, n)) is None else value * 2.0} for n in scalars]
    wrong.append({"gate_up": torch.cat(kernel.gate_up.chunk(2, dim=1)[::-1], dim=1)})
    for name in ("biases", "constants"):
        values = getattr(kernel, name)
        for n, value in enumerate(values):
            if value is not None:
                wrong.append({name: (*values[:n], value * 2, *values[n + 1 :])})
    for change in wrong:
        with pytest.raises(AssertionError):
            assert_same_layer(replace(kernel, **change), experts)


@pytest.mark.parametrize("recipe", ["trtllm_fp8_per_tensor", "cutlass_fp8_per_tensor"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gate_and_up_with_scales_of_their_own_get_the_larger_one(recipe, interleaved):
    """Codes under the larger scale stay; the others are rounded a second time, once."""
    case, plain = OF[recipe], make(OF[recipe], SWIGLU)
    w, codes = plain.gate_up_proj, plain.gate_up_proj.data.double()
    scale = torch.stack((w.scale, w.scale * torch.tensor([0.3, 1.0, 1.7])), dim=1)
    halves = QuantizedTensor.from_parts(w.data, scale, format="fp8_tensor")
    largest = scale.amax(1)
    again = tmoe.quantize(halves.dequantize(), "fp8_tensor", scale=largest)
    kept = (scale == largest[:, None]).repeat_interleave(case.I, dim=1)
    assert torch.equal(again.data.double()[kept], codes[kept])
    first = getattr(recipes, recipe)(replace(plain, gate_up_proj=halves, interleaved=interleaved))
    wanted = replace(plain, gate_up_proj=again, interleaved=interleaved)
    assert_same_layer(kernel_of(case, first, SWIGLU), wanted)
    assert torch.equal(w.data.double(), codes)  # what was given stays as it was


@pytest.mark.parametrize("case", [c for c in CASES if c.format == "nvfp4"], ids=str)
def test_halves_share_a_global_scale_or_are_refused(case):
    recipe, experts = getattr(recipes, case.recipe), make(case, SWIGLU)
    w = experts.gate_up_proj
    for factor in (1.0, 1.5):
        scale = torch.stack((w.global_scale, w.global_scale * factor), dim=1)
        halves = QuantizedTensor.from_parts(w.data, w.scale, format="nvfp4", global_scale=scale)
        changed = replace(experts, gate_up_proj=halves)
        if factor == 1.0:
            assert_same_layer(kernel_of(case, recipe(changed), SWIGLU), experts)
        else:
            with pytest.raises(ValueError, match="gate_up_proj must be of one global scale"):
                recipe(changed)


def test_scales_next_to_zero_are_raised_for_cutlass_alone():
    experts = make(OF["cutlass_fp8_block"], SWIGLU)
    scale = experts.gate_up_proj.scale
    scale[1, 0, 1], scale[2, 3, 0] = 0.0, 1e-30  # of a gate, of an up
    cutlass = undo.gate_first(recipes.cutlass_fp8_block(experts).quant_scales[0])
    assert torch.equal(cutlass, scale.clamp(min=1e-10)) and cutlass[1, 0, 1] > 0
    trtllm = undo.gate_first(recipes.trtllm_fp8_block(experts).gemm1_weights_scale)
    assert torch.equal(trtllm, scale)


DTYPES = {  # of weights and of their block scales, if there are any
    "trtllm_fp8_block": (torch.float8_e4m3fn, torch.float32),
    "trtllm_mxfp8": (torch.float8_e4m3fn, torch.uint8),
    "trtllm_fp4": (torch.uint8, torch.float8_e4m3fn),
    "cutlass_fp8_block": (torch.float8_e4m3fn, torch.float32),
    "cutlass_nvfp4": (torch.int64, torch.int32),
    "cutlass_mxfp4": (torch.int64, torch.int32),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dtypes_and_memory(case):
    """A checkpoint's loader often sets bf16 as the default; scalars are fp32 all the same."""
    experts = make(case, OAI if OAI in case.activations else SWIGLU, bias=case.bias)
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = prepared(case, experts).keywords()
    finally:
        torch.set_default_dtype(torch.float32)
    pair = (experts.gate_up_proj, experts.down_proj)
    parts = [w.parts() if isinstance(w, QuantizedTensor) else [w] for w in pair]
    given = {part.data_ptr() for part in (*parts[0], *parts[1])}
    weights, block_scales = DTYPES.get(case.recipe, (parts[1][0].dtype, None))
    made |= {f"scale {n}": scale for n, scale in enumerate(made.pop("quant_scales", []))}
    for name, value in made.items():
        if isinstance(value, Tensor):
            wanted = made["output_dtype"] if name.endswith("biases") else torch.float32
            if value.ndim >= 3:
                wanted = weights if name.endswith("weights") else block_scales
            assert value.dtype == wanted and value.is_contiguous(), name
            assert value.data_ptr() not in given, name


def test_cutlass_takes_one_scale_of_the_input():
    experts = make(OF["cutlass_fp8_per_tensor"], SWIGLU)
    for hidden_scale, shape in ((experts.hidden_scale, (E,)), (A2, ()), (torch.full((E,), A2), ())):
        made = recipes.cutlass_fp8_per_tensor(replace(experts, hidden_scale=hidden_scale))
        assert [tuple(s.shape) for s in made.quant_scales] == [(E,), shape, (E,), ()]


EACH = torch.tensor([0.1, 0.2, 0.3])
REFUSED = [  # recipe, what changes (or H and I), what is said
    ("trtllm_fp8_per_tensor", {"input_scale": EACH}, "input_scale must be the same for all exp"),
    ("trtllm_fp8_per_tensor", {"input_scale": None}, "must be a static scale, got None"),
    ("trtllm_fp8_per_tensor", {"hidden_scale": EACH[:2]}, r"of shape \(3,\), got \(2,\)"),
    ("trtllm_fp8_per_tensor", {"hidden_scale": 0.0}, "finite and above 0, got 0.0"),
    ("trtllm_fp8_per_tensor", {"activation": LIMITED}, "swiglu or .* without limit, got"),
    ("trtllm_fp8_per_tensor", {"gate_up_bias": torch.zeros(E, 80)}, "gate_up_bias must be None"),
    ("trtllm_fp8_per_tensor", (48, 40), "a hidden size that is a multiple of 32, got 48"),
    ("trtllm_fp8_block", {"interleaved": True}, "interleaved must be False"),
    ("trtllm_fp8_block", {"activation": OAI}, "activation must be swiglu, swiglu without limit"),
    ("trtllm_fp8_block", (384, 192), "an intermediate size that is a multiple of 128: .*, got 192"),
    ("trtllm_fp8_block", (320, 256), "a hidden size that is a multiple of 128, got 320"),
    ("trtllm_mxfp8", {"input_scale": 1.0}, "input_scale must be None for mxfp8, got 1.0"),
    ("trtllm_fp4", {"down_bias": torch.zeros(E, 5)}, r"down_bias must be of shape \(3, 160\)"),
    ("trtllm_fp4", {"activation": RELU2}, r"gate_up_proj must be of shape \(3, 48, 160\)"),
    ("trtllm_fp4", {"interleaved": True, "activation": RELU2}, "must be False without a gate"),
    ("trtllm_bf16", {"down_proj": torch.zeros(E, 64, 40)}, "of bfloat16, got float32"),
    ("cutlass_mxfp4", (192, 48), "a hidden size that is a multiple of 128, got 192"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "change", "said"), REFUSED)
def test_refusals(recipe, change, said):
    case = OF[recipe]
    if isinstance(change, tuple):
        case, change = replace(case, H=change[0], I=change[1]), {}
    experts = replace(make(case, SWIGLU), **change)
    with pytest.raises(ValueError, match=f"{recipe}: .*{said}"):
        prepared(case, experts)


def test_a_layout_that_is_not_shuffled_is_refused():
    experts = make(OF["trtllm_fp8_block"], SWIGLU)
    with pytest.raises(ValueError, match="weight_layout must be MajorK .*, got BlockMajorK"):
        recipes.trtllm_fp8_block(experts, weight_layout="BlockMajorK")
    with pytest.raises(ValueError, match="output_dtype must be bfloat16 or float16"):
        recipes.cutlass_fp8_block(experts, torch.float32)


@pytest.mark.parametrize("interleaved", [False, True])
def test_fp4_for_hopper_is_ordered_by_the_installed_helpers(interleaved, monkeypatch):
    """They get plain codes and scales, up first and filled up, and what they make is passed on."""
    given = {}

    def helper(name, *more):
        def interleave(tensor, *args):
            assert args == more
            given.setdefault(name, []).append(tensor)
            return tensor.clone()

        return interleave

    monkeypatch.setattr(cutlass_weights, "interleave_w4_weights", helper("codes"))
    monkeypatch.setattr(cutlass_weights, "interleave_w4_scales", helper("scales", 32))
    case = replace(OF["trtllm_fp4"], format="mxfp4", H=160, I=96)
    experts = make(case, OAI, bias=True, interleaved=interleaved)
    made = cutlass_weights.cutlass_mxfp4_a16(experts)
    assert made.use_w4_group_scaling and made.output_dtype == torch.bfloat16
    assert made.sizes == Sizes(160, 96, 256, 128)
    assert torch.equal(made.fc1_expert_weights, given["codes"][0])
    first, second = (
        undo.values_of(codes, scales, "mxfp4")
        for codes, scales in zip(given["codes"], given["scales"], strict=True)
    )
    first, bias = undo.gate_first(first), undo.gate_first(made.fc1_expert_biases)
    want, want_bias = experts.gate_up_proj.dequantize().double(), experts.gate_up_bias
    if interleaved:
        want = torch.cat((want[:, ::2], want[:, 1::2]), dim=1)
        want_bias = torch.cat((want_bias[:, ::2], want_bias[:, 1::2]), dim=1)
    filled = F.pad(want.unflatten(1, (2, -1)), (0, 96, 0, 32)).flatten(1, 2)
    assert torch.equal(first, filled)
    assert torch.equal(second, F.pad(experts.down_proj.dequantize().double(), (0, 32, 0, 96)))
    assert torch.equal(bias, F.pad(want_bias.unflatten(1, (2, -1)), (0, 32)).flatten(1))
    for scales, passed in zip(given["scales"], made.quant_scales, strict=True):
        assert passed.dtype == torch.int32 and torch.equal(passed, scales.view(torch.int32))
