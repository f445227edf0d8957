"""Weights prepared for FlashInfer: a layer computed by hand, in fp64, from what each recipe makes.

The arithmetic that imitates the kernels follows FlashInfer's documentation of the entry points and
uses nothing of what it tests. ``test_layouts.py`` undoes the layouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import tmoe
from tests.backends.flashinfer import test_layouts as undo
from tests.backends.flashinfer.test_layouts import recipes
from tests.reference import activation_ref, fused_experts_ref
from tmoe.activation import Activation
from tmoe.backends.flashinfer.layer import Experts, Sizes
from tmoe.formats import FORMATS, QuantizedTensor

E, T = 3, 5
A1, A2 = 0.125, 0.75  # static scales of the two inputs


@dataclass(frozen=True)
class Kernel:
    """What an entry point computes with. Scalars are one number, or one per expert."""

    gate_up: Tensor  # fp64 (E, 2I or I, H), rows [gate; up], without per-expert scales
    down: Tensor  # fp64 (E, H, I)
    input: Tensor | float  # x is multiplied with this before the first product,
    first: Tensor | float  # the first product with this,
    hidden: Tensor | float  # the activation's result with this,
    second: Tensor | float  # and the second product with this
    natural: bool  # biases, beta and limit meet the products after `first` and `second`, or before
    biases: tuple[Tensor | None, Tensor | None]
    constants: tuple[Tensor | None, Tensor | None, Tensor | None]  # alpha, beta, limit

    def run(self, x: Tensor, activation: Activation) -> Tensor:
        """x (T, H) fp64 -> (E, T, H): every expert's answer to every token."""

        def each(value: Tensor | float | None, default: float = 0.0) -> Tensor:
            value = torch.as_tensor(default if value is None else value, dtype=torch.float64)
            return value[:, None] if value.ndim == 2 else value.reshape(-1, 1, 1)

        first, second = each(self.first), each(self.second)
        unit1, unit2 = (1.0, 1.0) if self.natural else (first, second)
        x = torch.nn.functional.pad(x, (0, self.gate_up.shape[-1] - x.shape[-1]))
        acc = (x * each(self.input)) @ self.gate_up.mT * first + each(self.biases[0]) * unit1
        alpha = each(self.constants[0], 1.0)
        beta, limit = each(self.constants[1]) * unit1, each(self.constants[2], math.inf) * unit1
        if activation.gated:
            gate, up = acc.chunk(2, dim=-1)
            up = torch.maximum(torch.minimum(up, limit), -limit) + beta
            if activation.name in ("swiglu", "swiglu_oai"):
                gate = torch.minimum(gate, limit)
                gate = gate / (1 + torch.exp(-alpha * gate))
            elif activation.name == "swiglu_step":
                gate = torch.minimum(gate / (1 + torch.exp(-gate)), limit)
            else:
                gate = activation_ref(gate, None, "gelu", 1.0, math.inf)
            h = gate * up
        else:
            h = activation_ref(acc, None, activation.name, 1.0, math.inf)
        return (h * each(self.hidden)) @ self.down.mT * second + each(self.biases[1]) * unit2


def by_hand(experts: Experts, x: Tensor) -> Tensor:
    """The dequantised layer in fp64: (E, T, H), every expert's answer to every token."""
    a, weights = Activation.of(experts.activation), (experts.gate_up_proj, experts.down_proj)
    y = fused_experts_ref(
        x.repeat_interleave(E, dim=0),
        *(w.dequantize() if isinstance(w, QuantizedTensor) else w for w in weights),
        torch.ones(E * T, 1), torch.arange(E).repeat(T)[:, None],
        activation=a.name, alpha=a.alpha, limit=a.limit, interleaved=experts.interleaved,
        gate_up_bias=experts.gate_up_bias, down_bias=experts.down_bias,
    )  # fmt: skip
    return y.unflatten(0, (T, E)).transpose(0, 1)


def of_trtllm(made, format: str, activation: Activation) -> Kernel:
    """What a trtllm-gen entry point computes with, from what it is given."""
    gated, made = activation.gated, made.keywords()
    tile = 64 if format == "fp8_block" else 128
    matrices, biases = [], []
    for name in ("gemm1", "gemm2"):
        w, scale = made[f"{name}_weights"], made.get(f"{name}_weights_scale")
        if made.get("weight_layout") == "BlockMajorK":
            w = undo.unblocked(w)
        if scale is not None and format != "fp8_block":
            scale = undo.unshuffled(undo.unswizzled(scale, w, format), tile)
        if made.get("use_shuffled_weight", True):
            w = undo.unshuffled(w, tile)
        bias = made.get(f"{name}_bias")
        bias = None if bias is None else undo.unshuffled(bias, tile)
        if name == "gemm1" and gated:
            ordered = undo.gate_first if format == "fp8_block" else undo.gate_up_of_fused
            w, scale, bias = (None if part is None else ordered(part) for part in (w, scale, bias))
        matrices.append(undo.values_of(w, scale, format))
        biases.append(bias)
    scalars = dict.fromkeys(("input", "first", "hidden", "second"), 1.0)
    name = "output{}_scales_{}" if format == "fp8_tensor" else "output{}_scale_{}"
    if made.get(name.format(1, "scalar")) is not None:
        first, hidden = made[name.format(1, "gate_scalar")], made[name.format(1, "scalar")]
        scalars = {"input": 1 / A1, "first": first, "second": made[name.format(2, "scalar")]}
        # With a gate it stands in for the scale of acc's up half, too.
        scalars["hidden"] = hidden.double() / first.double() if gated else hidden
    constants = tuple(made.get(f"gemm1_{c}") for c in ("alpha", "beta", "clamp_limit"))
    return Kernel(*matrices, **scalars, natural=False, biases=tuple(biases), constants=constants)


def of_cutlass(made, format: str, activation: Activation) -> Kernel:
    """What `cutlass_fused_moe` computes with, from what it is given."""
    scales, gated = made.quant_scales, activation.gated
    block_scales = {"nvfp4": (1, 4), "mxfp4": (0, 2), "fp8_block": (0, 1)}.get(format)
    matrices = []
    for place, w in enumerate((made.fc1_expert_weights, made.fc2_expert_weights)):
        scale = None if block_scales is None else scales[block_scales[place]]
        if format in undo.PER_BYTE:
            w = w.view(torch.uint8)
            scale = undo.unswizzled(scale, w, format)
        if place == 0 and gated:
            w, scale = undo.gate_first(w), None if scale is None else undo.gate_first(scale)
        matrices.append(undo.values_of(w, scale, format))
    scalars = (1.0, 1.0, 1.0, 1.0)
    if format == "fp8_tensor":
        scalars = (1 / scales[3], *scales[:3])
    elif format == "nvfp4":
        scalars = (scales[0], *scales[2:4], scales[5])
    elif format == "mxfp4":
        scalars = (1.0, scales[1], 1.0, scales[3])
    bias1, bias2 = made.fc1_expert_biases, made.fc2_expert_biases
    biases = (undo.gate_first(bias1) if bias1 is not None and gated else bias1, bias2)
    constants = (made.swiglu_alpha, made.swiglu_beta, made.swiglu_limit)
    return Kernel(*matrices, *scalars, natural=True, biases=biases, constants=constants)


SWIGLU, RELU2, GEGLU = Activation("swiglu"), Activation("relu2"), Activation("geglu")
LIMITED, STEP = Activation.swiglu(limit=0.5), Activation.swiglu_step(limit=0.25)
OAI = Activation.swiglu_oai(alpha=1.702, limit=0.75)
FUSED = (SWIGLU, LIMITED, OAI, STEP, RELU2, GEGLU)


@dataclass(frozen=True)
class Case:
    recipe: str
    format: str  # of tmoe.quantize, or a dtype
    H: int
    I: int
    padded: tuple[int, int]  # H, and I with a gate
    ungated: int  # padded I without a gate
    activations: tuple[Activation, ...]
    bias: bool = False
    options: tuple = ()  # of the recipe

    def __str__(self) -> str:
        return "-".join((self.recipe, self.format, str(self.H), *(str(v) for _, v in self.options)))


SHUFFLED = (("use_shuffled_weight", True),)
BLOCKED = (*SHUFFLED, ("weight_layout", "BlockMajorK"))
CASES = [
    Case("trtllm_fp8_per_tensor", "fp8_tensor", 96, 40, (96, 48), 128, (SWIGLU, STEP, RELU2)),
    Case("trtllm_fp8_block", "fp8_block", 384, 256, (384, 256), 256, (SWIGLU,)),
    Case("trtllm_fp8_block", "fp8_block", 384, 256, (384, 256), 256, (SWIGLU,), False, SHUFFLED),
    Case("trtllm_fp8_block", "fp8_block", 384, 256, (384, 256), 256, (SWIGLU,), False, BLOCKED),
    Case("trtllm_mxfp8", "mxfp8", 96, 80, (256, 128), 128, FUSED),
    Case("trtllm_mxfp8", "mxfp8", 128, 128, (128, 128), 128, FUSED),
    Case("trtllm_fp4", "nvfp4", 160, 48, (256, 128), 128, FUSED, bias=True),
    Case("trtllm_fp4", "mxfp4", 288, 160, (512, 256), 256, FUSED, bias=True),
    Case("trtllm_bf16", "bfloat16", 64, 40, (64, 128), 128, (SWIGLU, LIMITED, OAI, STEP, RELU2)),
    Case("cutlass_bf16", "bfloat16", 24, 20, (24, 24), 24, FUSED, bias=True),
    Case("cutlass_bf16", "float16", 24, 24, (24, 24), 24, FUSED, bias=True),
    Case("cutlass_fp8_per_tensor", "fp8_tensor", 32, 40, (32, 48), 48, FUSED, bias=True),
    Case("cutlass_fp8_block", "fp8_block", 384, 256, (384, 256), 256, (SWIGLU,)),
    Case("cutlass_nvfp4", "nvfp4", 192, 48, (192, 64), 128, FUSED, bias=True),
    Case("cutlass_mxfp4", "mxfp4", 128, 48, (128, 128), 128, FUSED, bias=True),
]  # fmt: skip
OF = {case.recipe: case for case in CASES[::-1]}
LAYERS = [
    (case, activation, bias, interleaved)
    for case in CASES
    for activation in case.activations
    for bias in (False, True)[: 1 + case.bias]
    for interleaved in (False, True)[: 1 + (activation.gated and case.format != "fp8_block")]
]


def make(case: Case, activation: Activation, bias: bool = False, interleaved: bool = False):
    """A layer whose experts and projections are of different sizes, so that no two scales agree."""
    torch.manual_seed(case.H + case.I)
    rows = (1 + activation.gated) * case.I
    w13 = torch.randn(E, rows, case.H) * torch.tensor([0.3, 1.0, 2.0]).view(-1, 1, 1) * 0.1
    w2 = torch.randn(E, case.H, case.I) * torch.tensor([2.0, 0.5, 1.0]).view(-1, 1, 1)
    if case.format in FORMATS:
        block = (128, 128) if case.format == "fp8_block" else None
        w13, w2 = (tmoe.quantize(w.bfloat16(), case.format, block_shape=block) for w in (w13, w2))
    else:
        w13, w2 = (w.to(getattr(torch, case.format)) for w in (w13, w2))
    biases = (torch.randn(E, rows).bfloat16(), torch.randn(E, case.H).bfloat16())
    static = case.format in ("fp8_tensor", "nvfp4")
    return Experts(
        w13, w2, activation, interleaved, *(biases if bias else (None, None)),
        *((A1, torch.tensor([A2, 2 * A2, 3 * A2])) if static else (None, None)),
    )  # fmt: skip


def prepared(case: Case, experts: Experts):
    return getattr(recipes, case.recipe)(experts, **dict(case.options))


def kernel_of(case: Case, made, activation: Activation) -> Kernel:
    return (of_trtllm if "trtllm" in case.recipe else of_cutlass)(made, case.format, activation)


def assert_same_layer(kernel: Kernel, experts: Experts) -> None:
    activation = Activation.of(experts.activation)
    H = experts.down_proj.shape[1]
    x = torch.randn(T, H, dtype=torch.float64)
    got, want = kernel.run(x, activation), by_hand(experts, x)
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
    wrong = [{n: getattr(kernel, n) * 2.0} for n in ("input", "first", "hidden", "second")]
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
