"""Shapes, routes, floors and peers: what the benchmarks run is what its name says."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.reference import fused_experts_ref
from tmoe.bench import peer, peers
from tmoe.bench.cases import experts_case, prepared_weights
from tmoe.bench.reference import experts_in
from tmoe.bench.roofline import ROOFS, Roof, Work, experts_work
from tmoe.bench.shapes import GPU_SHAPES, ROUTINGS, SHAPES, TINY, routed_inputs, routing_of
from tmoe.shapes import layer_shape, random_weights

H200 = ROOFS["NVIDIA H200", torch.bfloat16]
CPU = torch.device("cpu")


def test_shapes_are_of_the_models_that_people_ask_about():
    wanted = {
        "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3-tp8", "deepseek-v3-ep8",
        "llama4-scout", "llama4-maverick", "gpt-oss-20b", "gpt-oss-120b", "glm-4.5", "kimi-k2",
        "olmoe",
    }  # fmt: skip
    assert wanted <= SHAPES.keys()
    for shape in SHAPES.values():
        assert routing_of(shape).top_k == shape.top_k
    assert TINY not in GPU_SHAPES and len(GPU_SHAPES) == 7


def test_ranks_cut_a_layer_without_a_rest():
    shape = layer_shape("deepseek-v3", tp=2, ep=8)
    assert (shape.name, shape.num_experts, shape.intermediate) == ("deepseek-v3-tp2-ep8", 32, 1024)
    with pytest.raises(ValueError, match="layer_shape: ep must be a divisor of num_experts=256"):
        layer_shape("deepseek-v3", ep=3)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_tokens_spread_as_the_routing_says(routing):
    shape = replace(TINY, num_experts=16, top_k=2, hidden=8)
    x, weights, ids = routed_inputs(shape, 4096, CPU, torch.bfloat16, routing)
    again = routed_inputs(shape, 4096, CPU, torch.bfloat16, routing)
    other = routed_inputs(shape, 4096, CPU, torch.bfloat16, routing, seed=1)
    assert all(map(torch.equal, (x, weights, ids), again)) and not torch.equal(x, other[0])
    assert (x.dtype, weights.dtype, ids.dtype) == (torch.bfloat16, torch.float32, torch.int32)
    most = ids.flatten().bincount(minlength=16).max().item() / 4096
    # Zipf 1.2: the first of two different draws of 16 gets r^-1.2 / sum = 0.39, the pair 0.63.
    wanted = {"random": (0.12, 0.15), "balanced": (0.125, 0.125), "zipf": (0.6, 0.66)}
    low, high = wanted.get(routing, (1, 1))
    assert low <= most <= high


def test_floor_is_the_larger_of_arithmetic_and_traffic():
    roof = Roof(tflops=100, gbs=1000, source="made up")
    assert Work(flops=2e9, bytes=1e6).floor_us(roof) == pytest.approx(20)  # 2e9 / 100e12 s
    assert Work(flops=2e9, bytes=3e7).floor_us(roof) == pytest.approx(30)  # 3e7 / 1000e9 s


def test_work_of_a_layer_by_hand():
    # Mixtral, 16 tokens, all 8 experts: 8 · 3 · 4096 · 14336 weights, x and y of 16 · 4096; 2 bytes
    work = experts_work(SHAPES["mixtral-8x7b"], 16, 8, 2)
    assert work.bytes == 2 * (1_409_286_144 + 131_072)
    assert work.flops == 2 * 16 * 2 * 176_160_768
    assert work.floor_us(H200) == pytest.approx(648, abs=0.5)
    # 8192 tokens: 5.77 TFLOP decide
    work = experts_work(SHAPES["mixtral-8x7b"], 8192, 8, 2)
    assert work.floor_us(H200) == pytest.approx(7738, abs=0.5)


def test_the_reference_of_benchmarks_is_that_of_the_suite():
    """Two loops that were written apart."""
    x, weights, ids = routed_inputs(TINY, 5, CPU, torch.float64)
    layer = x, *random_weights(TINY, CPU, torch.float64), weights, ids
    for on_input in (False, True):
        mine = experts_in(torch.float64, *layer, weight_on_input=on_input)
        torch.testing.assert_close(mine, fused_experts_ref(*layer, weight_on_input=on_input))


def case(backend, scheme="bf16", dtype=torch.float32, routing="random", tokens=5, shape=TINY):
    torch.manual_seed(0)
    weights = prepared_weights(random_weights(shape, CPU, dtype), scheme)
    options = {"scheme": scheme, "routing": routing, "device": CPU, "dtype": dtype}
    return experts_case(shape, tokens, backend, weights, **options)


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block"])
def test_a_case_finds_what_is_wrong(scheme):
    right = case("torch", scheme)
    right.verify()
    wrong = replace(right, call=lambda *inputs: right.call(*inputs) * 1.2)
    with pytest.raises(AssertionError, match="error .* allowed"):
        wrong.verify()


@pytest.mark.parametrize("backend", ["grouped_mm", "torch_grouped_mm"])
@pytest.mark.parametrize("routing", ["random", "one_expert"])
def test_peers_that_run_anywhere_are_right(backend, routing):
    case(backend, routing=routing).verify()
    case(backend, routing=routing, dtype=torch.bfloat16, tokens=1).verify()


@pytest.mark.parametrize("backend", ["vllm", "triton_kernels", "sonicmoe", "flashinfer"])
def test_a_peer_that_is_not_installed_says_so(backend, monkeypatch):
    monkeypatch.setattr(peer, "installed_version", lambda package: None)
    package = peers.PEERS[backend].package
    with pytest.raises(peers.Missing, match=f"{backend} needs {package}, which isn't installed"):
        case(backend)
    with pytest.raises(peers.Missing, match="is measured in bf16.*, not in nvfp4"):
        case(backend, "nvfp4")


@pytest.mark.parametrize("backend", ["flashinfer_trtllm", "flashinfer_cutlass"])
def test_a_backend_that_cannot_prepare_says_why(backend):
    """Not on this machine, and with fp32 rows on none."""
    with pytest.raises(peers.Missing, match=f"{backend}. was asked for and can.t run"):
        case(backend)


@pytest.fixture
def stand_in(monkeypatch):
    """Modules with these functions, in the place of a library that counts as installed."""

    def put(**modules):
        monkeypatch.setattr(peer, "installed_version", lambda _: "1.0")
        for name, functions in modules.items():
            module = ModuleType(name)
            vars(module).update(functions)
            monkeypatch.setitem(sys.modules, name.replace("__", "."), module)

    return put


def test_a_package_that_cannot_be_imported_says_why(monkeypatch):
    monkeypatch.setattr(peer, "installed_version", lambda _: "1.0")
    monkeypatch.setitem(sys.modules, "sonicmoe", None)
    with pytest.raises(peers.Missing, match="sonicmoe can't be imported"):
        case("sonicmoe")


def test_flashinfer_gets_up_first(stand_in):
    """A stand-in by the documented layout, rows [up; gate], written as the loop of the suite."""

    def cutlass_fused_moe(
        input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights,
        output_dtype, quant_scales, *, output,
    ):  # fmt: skip
        up, gate = fc1_expert_weights.chunk(2, dim=1)
        layer = torch.cat([gate, up], 1), fc2_expert_weights
        topk = token_final_scales, token_selected_experts
        output.copy_(fused_experts_ref(input, *layer, *topk, dtype=output_dtype))

    stand_in(flashinfer__fused_moe={"cutlass_fused_moe": cutlass_fused_moe})
    case("flashinfer").verify()


def test_vllm_is_called_as_it_is(stand_in):
    def fused_experts(hidden_states, w1, w2, topk_weights, topk_ids):
        layer = hidden_states, w1, w2, topk_weights, topk_ids
        return fused_experts_ref(*layer, dtype=hidden_states.dtype)

    stand_in(vllm__model_executor__layers__fused_moe={"fused_experts": fused_experts})
    case("vllm").verify()


def _multiply_codes(x, first, second, topk_weights, topk_ids, config):
    """What vLLM's FP8 layers compute, from codes and the scales that they were told of."""
    per_row, block = config["per_out_ch_quant"], config["block_shape"]
    weights = []
    for codes, scale in ((first, config["w1_scale"]), (second, config["w2_scale"])):
        if block is not None:
            scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
            scale = scale[:, : codes.shape[1], : codes.shape[2]]
        elif not per_row:
            scale = scale[:, None, None]
        weights.append(codes.to(x.dtype) * scale.to(x.dtype))
    return fused_experts_ref(x, *weights, topk_weights, topk_ids, dtype=x.dtype)


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_vllm_is_told_of_scales(stand_in, scheme):
    """A weight's by expert, by row with a column of its own, or by block; static ones of rows."""
    told = {}

    def fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, quant_config):
        told.update(quant_config)
        return _multiply_codes(hidden_states, w1, w2, topk_weights, topk_ids, quant_config)

    moe = "vllm__model_executor__layers__fused_moe"
    config = {"fp8_w8a8_moe_quant_config": lambda **given: given}
    stand_in(**{moe: {"fused_experts": fused_experts}, f"{moe}__config": config})
    whole_blocks = replace(TINY, hidden=128, intermediate=256)
    case("vllm", scheme, shape=whole_blocks).verify()
    assert (told["a1_scale"] is not None) == (scheme == "fp8_tensor")
    assert told["per_act_token_quant"] == told["per_out_ch_quant"] == (scheme == "fp8_channel")
    assert told["block_shape"] == ([128, 128] if scheme == "fp8_block" else None)
    if scheme == "fp8_block":
        for sizes in ({"hidden": 192}, {"intermediate": 64}):
            with pytest.raises(peers.Missing, match="whole blocks of 128"):
                case("vllm", scheme, shape=replace(whole_blocks, **sizes))


def test_sonicmoe_gets_experts_last(stand_in, monkeypatch):
    """By its source: w1 (2I, H, E), w2 (H, I, E), a line per (token, expert), tokens ascending."""
    swiglu = object()

    def moe_general_routing_inputs(
        x, scores, tokens, experts, w1, b1, w2, b2, E, stream, activation,
        is_inference_mode_enabled, concat_layout,
    ):  # fmt: skip
        assert activation is swiglu and is_inference_mode_enabled and concat_layout
        assert b1 is b2 is None and (tokens.diff() >= 0).all()
        ids = experts.view(len(x), -1)
        weights = w1.permute(2, 0, 1), w2.permute(2, 0, 1)
        y = fused_experts_ref(x, *weights, scores.view(ids.shape), ids, dtype=x.dtype)
        return y, experts.bincount(minlength=E)

    kinds = ModuleType("kinds")
    kinds.SWIGLU = swiglu
    stand_in(
        sonicmoe={"moe_general_routing_inputs": moe_general_routing_inputs},
        sonicmoe__enums={"ActivationType": kinds},
    )
    stream = ModuleType("stream")
    stream.cuda_stream = 0
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    case("sonicmoe").verify()


def test_triton_kernels_computes_the_usual_swiglu(stand_in):
    """By its source: interleaved columns, s = g / (1 + exp(-alpha g)), s · up + s, logits in."""

    class Activation:
        def __init__(self, specs, arguments, reduction):
            self.alpha, self.limit = arguments
            assert specs[0] == "swiglu" and reduction == 2 and self.limit is None

        def __call__(self, columns):
            gate, up = columns[..., ::2], columns[..., 1::2]
            s = gate / (1 + torch.exp(-self.alpha * gate))
            return s * up + s

    def routing(logits, top_k):
        scale, ids = logits.softmax(-1).topk(top_k)
        data = ModuleType("data")
        data.gate_scal = (scale / scale.sum(-1, keepdim=True)).flatten()
        return data, ids, ids

    def matmul_ogs(
        x, w, bias, data, gather_indx=None, scatter_indx=None, gammas=None, fused_activation=None
    ):
        if gather_indx is not None:
            rows = x.repeat_interleave(gather_indx.shape[1], 0)
            experts = gather_indx.flatten()
            out = torch.einsum("sd,sdn->sn", rows, w[experts]) + bias[experts]
            matmul_ogs.experts = experts
            return fused_activation(out)
        out = torch.einsum("sd,sdn->sn", x, w[scatter_indx.flatten()]) * gammas[:, None]
        return out.view(*scatter_indx.shape, -1).sum(1)

    ogs = {"matmul_ogs": matmul_ogs, "FusedActivation": Activation, "FnSpecs": lambda *a: a}
    stand_in(
        vllm__utils__import_utils={"import_triton_kernels": lambda: None},
        triton_kernels__matmul_ogs=ogs,
        triton_kernels__routing={"routing": routing},
        triton_kernels__swiglu={"swiglu_fn": None},
    )
    case("triton_kernels").verify()
