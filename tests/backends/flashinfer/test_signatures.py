"""FlashInfer's signatures, as recorded from its wheels."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
from packaging.version import Version

from tmoe.backends.flashinfer.signatures import (
    SourceText,
    binds,
    enum_members,
    recorded_versions,
    signature,
)
from tools import record_flashinfer

# What stands below was written by hand, from notes made while reading FlashInfer's sources.

SWIGLU = "activation_type=ActivationType.Swiglu.value"
EXPERTS = """num_experts top_k n_group topk_group
    intermediate_size local_expert_offset local_num_experts"""
PER_TENSOR = f"""routing_bias hidden_states gemm1_weights output1_scales_scalar
    output1_scales_gate_scalar gemm2_weights output2_scales_scalar {EXPERTS} routed_scaling_factor
    use_routing_scales_on_input routing_method_type=0 do_finalize=True enable_pdl=None
    tune_max_num_tokens=8192 {SWIGLU}"""
BLOCK = f"""routing_bias hidden_states hidden_states_scale gemm1_weights gemm1_weights_scale
    gemm2_weights gemm2_weights_scale {EXPERTS} routed_scaling_factor routing_method_type=0
    use_shuffled_weight=False weight_layout=0 do_finalize=True enable_pdl=None"""
FP4 = f"""routing_bias hidden_states hidden_states_scale gemm1_weights gemm1_weights_scale
    gemm1_bias gemm1_alpha gemm1_beta gemm1_clamp_limit gemm2_weights gemm2_weights_scale gemm2_bias
    output1_scale_scalar output1_scale_gate_scalar output2_scale_scalar {EXPERTS}
    routed_scaling_factor routing_method_type=0 do_finalize=True enable_pdl=None {SWIGLU}
    output=None tune_max_num_tokens=8192"""
BF16 = f"""hidden_states gemm1_weights gemm2_weights {EXPERTS} routed_scaling_factor=None
    routing_method_type=0 use_shuffled_weight=True weight_layout=WeightLayout.BlockMajorK
    do_finalize=True enable_pdl=True tune_max_num_tokens=8192 {SWIGLU}"""
CUTLASS = """input token_selected_experts token_final_scales fc1_expert_weights fc2_expert_weights
    output_dtype quant_scales fc1_expert_biases=None fc2_expert_biases=None input_sf=None
    swiglu_alpha=None swiglu_beta=None swiglu_limit=None tp_size=1 tp_rank=0 ep_size=1 ep_rank=0
    cluster_size=1 cluster_rank=0 output=None enable_alltoall=False
    use_deepseek_fp8_block_scale=False use_w4_group_scaling=False use_mxfp8_act_scaling=False
    min_latency_mode=False use_packed_weights=False tune_max_num_tokens=8192 enable_pdl=None
    activation_type=ActivationType.Swiglu swizzled_input_sf=True"""
FP8_KIND = f"""tune_max_num_tokens=8192
    fp8_quantization_type=Fp8QuantizationType.DeepSeekFp8 {SWIGLU}"""
FROM_LOGITS = "norm_topk_prob=True routing_replay_out=None"
SWIGLU_NUMBERS = "gemm1_alpha=None gemm1_beta=None gemm1_clamp_limit=None"
VALID = "valid_hidden_size=None valid_intermediate_size=None"

# For each function what a release added or changed, "-" before what it took away.
HISTORY = {
    "trtllm_fp8_per_tensor_scale_moe": {
        "0.6.8": f"routing_logits {PER_TENSOR} {FROM_LOGITS}",
        "0.6.15": "output=None",
        "0.7.2.post1": "gemm1_clamp_limit=None",
        "0.7.4": "workspace_buffer=None",
    },
    "trtllm_fp8_per_tensor_scale_routed_moe": {
        "0.6.17": f"topk_ids {PER_TENSOR} routing_replay_out=None output=None",
        "0.7.2.post1": "gemm1_clamp_limit=None",
        "0.7.4": "workspace_buffer=None",
    },
    "trtllm_fp8_block_scale_moe": {
        "0.6.8": f"routing_logits {BLOCK} {FP8_KIND} {FROM_LOGITS}",
        "0.6.15": f"num_fused_shared_experts=None {SWIGLU_NUMBERS} output=None",
        "0.7.0": f"{VALID} gemm1_bias=None gemm2_bias=None",
        "0.7.4": "workspace_buffer=None",
    },
    "trtllm_fp8_block_scale_routed_moe": {
        "0.6.8": f"topk_ids {BLOCK} output=None {FP8_KIND}",
        "0.6.15": f"gemm1_lora_delta=None {SWIGLU_NUMBERS}",
        "0.7.0": VALID,
        "0.7.4": "workspace_buffer=None",
    },
    "trtllm_fp4_block_scale_moe": {
        "0.6.8": f"routing_logits {FP4} {FROM_LOGITS}",
        "0.6.11": "per_token_scale=None",
        "0.6.17": "num_fused_shared_experts=None",
        "0.7.0": f"{VALID} hidden_states_scale_layout=None",
        "0.7.4": "workspace_buffer=None nvfp4_4over6=_UNSET",
    },
    "trtllm_fp4_block_scale_routed_moe": {
        "0.6.8": f"topk_ids {FP4}",
        "0.6.11": "per_token_scale=None",
        "0.6.18.post1": "gemm1_lora_delta=None",
        "0.7.0": f"{VALID} num_fused_shared_experts=None hidden_states_scale_layout=None",
        "0.7.4": "workspace_buffer=None nvfp4_4over6=_UNSET routing_metadata=None",
    },
    "trtllm_bf16_moe": {
        "0.6.8": f"routing_logits routing_bias {BF16} {FROM_LOGITS}",
        "0.6.15": f"{SWIGLU_NUMBERS} output=None",
        "0.7.4": "workspace_buffer=None",
    },
    "trtllm_bf16_routed_moe": {
        "0.6.8": f"topk_ids {BF16} routing_replay_out=None",
        "0.6.15": f"gemm1_lora_delta=None {SWIGLU_NUMBERS} output=None",
        "0.7.4": "workspace_buffer=None",
    },
    "cutlass_fused_moe": {
        "0.6.8": CUTLASS,
        "0.6.15": "use_fused_finalize=True",
        "0.6.16": "use_wfp4afp8_humming=False profile_ids=None workspace_buffer=None",
        "0.6.16.post4": "-use_wfp4afp8_humming",
        "0.6.18.post1": "use_wfp4afp8_humming=False",
        "0.7.0": "situ_beta=None situ_linear_beta=None",
        "0.7.2.post1": "clamped_relu2_limit=None backend='cutlass'",
        "0.7.4": "use_fused_finalize=None nvfp4_4over6=_UNSET",
    },
    "preprocess_moe_weights_for_sm90_mixed_gemm_humming": {
        "0.6.16": "weight raw_scale max_range=11 interleave=True",
        "0.6.16.post4": "-weight -raw_scale -max_range -interleave",
        "0.6.18.post1": "weight raw_scale max_range=11 interleave=True",
    },
    "interleave_moe_weights_for_sm90_mixed_gemm": {"0.6.11": "weight quant_type='fp4'"},
    "fp4_quantize": {
        "0.6.8": "input global_scale=None sf_vec_size=16 sf_use_ue8m0=False "
        "is_sf_swizzled_layout=True is_sf_8x4_layout=False enable_pdl=None backend='cuda'",
        "0.6.11": "is_global_scale_inversed=False",
        "0.7.2.post1": "nvfp4_4over6=_UNSET",
        "0.7.4": "backend='auto' batch_invariant=False",
    },
    "nvfp4_block_scale_interleave": {"0.6.8": "unswizzled_sf", "0.7.2.post1": "out=None"},
    "deinterleave_gated_rows": {"0.7.4": "x block"},
}


@pytest.mark.parametrize("version", recorded_versions(), ids=str)
@pytest.mark.parametrize("entry_point", HISTORY)
def test_what_a_function_takes(entry_point, version):
    wanted: dict[str, str] = {}
    for release, changes in HISTORY[entry_point].items():
        for change in changes.split() if Version(release) <= version else ():
            name, _, default = change.partition("=")
            if name.startswith("-"):
                del wanted[name[1:]]
            else:
                wanted[name] = default
    taken = signature(version, entry_point)
    if not wanted:
        assert taken is None
        return
    found = {
        p.name: "" if p.default is p.empty else repr(p.default) for p in taken.parameters.values()
    }
    assert found == wanted
    assert binds(taken, [name for name, default in wanted.items() if not default]) is None


def test_where_parameters_stand():
    for version, entry_point, pair in (
        ("0.6.11", "trtllm_fp4_block_scale_moe", "per_token_scale, output"),
        ("0.6.15", "trtllm_fp8_block_scale_moe", "num_fused_shared_experts, activation_type"),
        ("0.6.15", "trtllm_fp8_block_scale_routed_moe", "gemm1_lora_delta, output"),
        ("0.6.16", "cutlass_fused_moe", "use_wfp4afp8_humming, tune_max_num_tokens"),
        ("0.6.11", "fp4_quantize", "is_global_scale_inversed, enable_pdl"),
    ):
        assert pair in ", ".join(signature(Version(version), entry_point).parameters)
    for entry_point, names in (
        ("trtllm_fp8_block_scale_moe", "gemm1_bias gemm2_bias workspace_buffer"),
        ("trtllm_bf16_moe", ""),
        ("trtllm_fp8_per_tensor_scale_moe", ""),
    ):
        parameters = signature(Version("0.7.4"), entry_point).parameters.values()
        assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == names.split()


METHODS = "Default Renormalize DeepSeekV3 Llama4 RenormalizeNaive TopK SigmoidRenorm MiniMax2"
ACTIVATIONS = "Gelu Relu Silu Swiglu Geglu SwigluBias Relu2"
MORE_ACTIVATIONS = f"{ACTIVATIONS} SwigluStep GegluTanh Identity"


@pytest.mark.parametrize(
    "enum, version, members",  # in the order of their numbers, from 0
    [
        ("RoutingMethodType", "0.6.8", f"{METHODS} Unspecified"),
        ("RoutingMethodType", "0.6.11", f"{METHODS} Sigmoid Unspecified"),
        ("RoutingMethodType", "0.6.17", f"{METHODS} Sigmoid Unspecified"),
        ("RoutingMethodType", "0.6.18.post1", f"{METHODS} Sigmoid TopKSigmoid Unspecified"),
        ("ActivationType", "0.6.8", f"{ACTIVATIONS} Identity InvalidType"),
        ("ActivationType", "0.6.15", f"{MORE_ACTIVATIONS} InvalidType"),
        ("ActivationType", "0.6.16", f"{MORE_ACTIVATIONS} Situ InvalidType"),
        ("ActivationType", "0.7.0", f"{MORE_ACTIVATIONS} Situ InvalidType"),
        ("ActivationType", "0.7.2.post1", f"{MORE_ACTIVATIONS} Situ InvalidType ClampedRelu2"),
        ("ActivationType", "0.7.4", f"{MORE_ACTIVATIONS} Situ InvalidType ClampedRelu2 PowLU"),
        ("Fp8QuantizationType", "0.6.18.post1", "NoneFp8 DeepSeekFp8 MxFp8"),
        ("Fp8QuantizationType", "0.7.0", "NoneFp8 DeepSeekFp8 MxFp8 PerTensorFp8 PerChannelFp8"),
        ("WeightLayout", "0.6.8", "MajorK MajorMn BlockMajorK"),
        ("SfLayout", "0.6.8", "layout_128x4 layout_8x4 layout_linear"),
        ("RoutingInputMode", "0.6.11", ""),
        ("RoutingInputMode", "0.6.12", "FromLogits PackedPrecomputed UnpackedPrecomputed"),
        ("GatedActType", "0.7.4", "SwiGlu GeGlu"),
    ],
)
def test_the_numbers_of_an_enum(enum, version, members):
    wanted = {name: number for number, name in enumerate(members.split())}
    assert enum_members(Version(version), enum) == wanted


def test_a_version_has_what_the_recorded_one_below_it_has():
    versions = "0.6.10 0.6.14 0.6.16.post1 0.6.18 0.7.0rc1 0.7.2 0.7.4+cu130 0.7.9"
    recorded = "0.6.8.post1 0.6.12 0.6.16 0.6.17 0.6.18.post1 0.7.0 0.7.4 0.7.4"
    for version, below in zip(versions.split(), recorded.split(), strict=True):
        version, below = Version(version), Version(below)
        for entry_point in HISTORY:
            assert signature(version, entry_point) == signature(below, entry_point)
        for enum in record_flashinfer.ENUMS:
            assert enum_members(version, enum) == enum_members(below, enum)


@pytest.mark.parametrize("version", ["0.6.7", "0.6.8rc1", "0.8", "0.8.0.dev1", "0.8.0rc1", "1.0"])
def test_nothing_is_said_outside_the_known_range(version):
    assert signature(Version(version), "cutlass_fused_moe") is None
    assert enum_members(Version(version), "RoutingMethodType") == {}


def test_a_name_that_no_release_has_is_an_error():
    with pytest.raises(ValueError, match="signature: entry_point must be .*, got 'cutlas'"):
        signature(Version("0.7.4"), "cutlas")
    with pytest.raises(ValueError, match="enum_members: enum must be .*, got 'Layout'"):
        enum_members(Version("0.9"), "Layout")


def test_a_call_binds_or_says_why_not():
    """EN05"""

    def function(a, b, *, c, d=None): ...

    def open_function(a, /, **more): ...

    taken, takes_all = inspect.signature(function), inspect.signature(open_function)
    assert binds(taken, ["c", "b", "a"]) is None
    assert binds(taken, iter("abcd")) is None
    assert binds(taken, ["a"]) == "it requires b, c"
    assert binds(taken, "abcxy") == "it has no parameter x, y"
    assert binds(taken, ["a", "c", "e"]) == "it requires b and has no parameter e"
    assert binds(takes_all, ["b"]) == binds(takes_all, ["a"]) == "it requires a"


def test_an_installed_flashinfer_is_as_recorded():
    flashinfer = pytest.importorskip("flashinfer", exc_type=ImportError)
    version = Version(flashinfer.__version__)
    if version not in recorded_versions():
        pytest.skip(f"FlashInfer {version} isn't recorded: tools/record_flashinfer.py reads it")
    for name, entry_points in record_flashinfer.ENTRY_POINTS.items():
        module = importlib.import_module(name) if importlib.util.find_spec(name) else None
        for entry_point in entry_points:
            function, recorded = getattr(module, entry_point, None), signature(version, entry_point)
            if function is None or recorded is None:
                assert function is recorded, entry_point
                continue
            written = inspect.unwrap(function).__globals__
            ours = [
                p.replace(default=eval(p.default, written))
                if isinstance(p.default, SourceText)
                else p
                for p in recorded.parameters.values()
            ]
            live = inspect.signature(function).parameters.values()
            assert ours == [p.replace(annotation=p.empty) for p in live], entry_point
    modules = [importlib.import_module(name) for name in record_flashinfer.ENUM_MODULES]
    for enum in record_flashinfer.ENUMS:
        live = next((getattr(module, enum) for module in modules if hasattr(module, enum)), ())
        assert {member.name: int(member) for member in live} == enum_members(version, enum)
