"""What the stand-in refuses, as the real launchers do or as misuse, and how it is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import sys
from types import ModuleType

import pytest
import torch

from tests.backends.flashinfer import stand_in
from tests.backends.flashinfer.calling import INPUTS, VARIANTS, E, Example, T
from tests.backends.flashinfer.cases import CASES, OF, STEP, SWIGLU
from tests.backends.flashinfer.stand_in import Misuse
from tmoe.backends.flashinfer.signatures import enum_members, recorded_versions, signature
from tools.record_flashinfer import ENTRY_POINTS, ENUMS

VERSION = "0.7.4"
BY_INPUTS = {(case.recipe, inputs): case for case, inputs in VARIANTS[::-1]}
GEGLU, STEP_TYPE, TOPK, LLAMA4, DEEPSEEK = 4, 7, 5, 3, 2  # numbers in 0.7.4
MAJOR_K, DEFAULT_FP8 = 0, 0
SWIZZLED = 0
FP8, BLOCK, MXFP8 = "trtllm_fp8_per_tensor", "trtllm_fp8_block", "trtllm_mxfp8"
FP4, BF16 = "trtllm_fp4", "trtllm_bf16"
C_FP8, C_BLOCK, C_NVFP4 = "cutlass_fp8_per_tensor", "cutlass_fp8_block", "cutlass_nvfp4"
C_BF16, C_MXFP4 = "cutlass_bf16", "cutlass_mxfp4"


def in_bf16(name):
    return lambda k: {name: k[name].bfloat16()}


def in_fp64(name):
    return lambda k: {name: k[name].double()}


def strided(tensor):
    return tensor.mT.contiguous().mT


def as_list(change):
    return lambda k: {"quant_scales": change(list(k["quant_scales"]))}


REFUSED = [  # recipe, inputs, what changes, what is raised, what is said
    (BF16, "bf16", {"weight_layout": MAJOR_K}, RuntimeError, "weight_layout must be BlockMajorK"),
    (BF16, "bf16", {"use_shuffled_weight": False}, RuntimeError, "use_shuffled_weight must be"),
    (BF16, "bf16", {"activation_type": GEGLU}, RuntimeError, "activation_type must be .*Relu2"),
    (BF16, "bf16", {"activation_type": 99}, RuntimeError, "a number of ActivationType, got 99"),
    (BF16, "bf16", {"intermediate_size": 64}, RuntimeError, "a multiple of 128, got 64"),
    (BF16, "bf16", {"intermediate_size": 256}, RuntimeError, r"gemm1_weights must be .*\(8, 1, 51"),
    (BF16, "bf16", {"top_k": 0}, RuntimeError, "top_k must be at least 1, got 0"),
    (BF16, "bf16", {"top_k": 2.0}, TypeError, "top_k must be an int, got 2.0"),
    (BF16, "bf16", {"top_k": 9}, RuntimeError, "top_k must be at most num_experts 8, got 9"),
    (BF16, "bf16", {"top_k": 3}, RuntimeError, r"topk_ids must be torch.int32 \(5, 3\)"),
    (BF16, "bf16", {"num_experts": 10}, Misuse, "num_experts must be a multiple of 4, got 10"),
    (BF16, "bf16", {"num_experts": 2052}, RuntimeError, "of a compiled size"),
    (BLOCK, "fp8_block", {"num_experts": 10}, RuntimeError, "a multiple of 4, got 10"),
    (BF16, "bf16", {"n_group": 2, "topk_group": 1}, Misuse, "n_group must be 0 or 1"),
    (BLOCK, "fp8_block", {"n_group": 2, "topk_group": 1}, RuntimeError, "n_group must be 0 or 1"),
    (BLOCK, "fp8_block", {"routing_method_type": DEEPSEEK}, RuntimeError, "n_group must be 1 or"),
    (BLOCK, "fp8_block", {"routing_method_type": LLAMA4}, RuntimeError, "top_k must be 1 for Lla"),
    (BF16, "bf16", {"routing_method_type": LLAMA4}, Misuse, "top_k must be 1 for Llama4"),
    (BF16, "bf16", {"routing_method_type": 10}, RuntimeError, "must be specified"),
    (BF16, "bf16", {"local_expert_offset": 4}, RuntimeError, "local_num_experts must be up to 8"),
    (BF16, "bf16", {"routed_scaling_factor": 2.5}, Misuse, "None where ids are given, got 2.5"),
    (FP4, "nvfp4", {"routing_bias": torch.zeros(E)}, Misuse, "routing_bias must be None where"),
    (BF16, "bf16", {"do_finalize": False}, Misuse, "do_finalize must be True"),
    (BF16, "bf16", {"gemm1_lora_delta": torch.ones(1)}, Misuse, "gemm1_lora_delta must be left ou"),
    (FP4, "nvfp4", {"valid_hidden_size": 160}, Misuse, "valid_hidden_size must be left out"),
    (BF16, "bf16", in_bf16("gemm1_beta"), RuntimeError, "gemm1_beta must be torch.float32"),
    (FP4, "nvfp4", in_bf16("gemm1_beta"), Misuse, "gemm1_beta must be torch.float32"),
    (FP4, "nvfp4", in_bf16("gemm1_bias"), Misuse, "gemm1_bias must be torch.float32"),
    (FP4, "nvfp4", in_fp64("output2_scale_scalar"), Misuse, "output2_scale_scalar must be torch.f"),
    (FP8, "fp8_tensor", in_fp64("output2_scales_scalar"), RuntimeError, "output2_scales_scalar"),
    (FP4, "nvfp4", {"output1_scale_scalar": None}, RuntimeError, "must be given for FP4 inputs"),
    (FP4, "mxfp4_a8", {"output1_scale_scalar": torch.ones(E)}, Misuse, "None beside MXFP4"),
    (FP4, "mxfp4_a16", {"activation_type": STEP_TYPE}, RuntimeError, "activation_type must be"),
    (FP4, "nvfp4", {"hidden_states_scale": None}, RuntimeError, "given for FP4 inputs, got None"),
    (FP4, "nvfp4", lambda k: {"hidden_states_scale": k["hidden_states_scale"].view(torch.uint8)},
     RuntimeError, "hidden_states_scale must be torch.float8_e4m3fn"),
    (FP4, "nvfp4", {"hidden_states_scale_layout": SWIZZLED}, ValueError, "must be linear"),
    (FP4, "nvfp4", {"nvfp4_4over6": object()}, Misuse, "nvfp4_4over6 must be None"),
    (FP4, "mxfp4_a8", {"hidden_states_scale": None}, Misuse, "hidden_states_scale must be MXFP8"),
    (FP4, "nvfp4", lambda k: {"gemm1_weights_scale": k["gemm1_weights_scale"].view(torch.uint8)},
     RuntimeError, "gemm1_weights_scale must be torch.float8_e4m3fn"),
    (MXFP8, "mxfp8", {"use_shuffled_weight": False}, RuntimeError, "use_shuffled_weight must be"),
    (MXFP8, "mxfp8", {"fp8_quantization_type": DEFAULT_FP8}, NotImplementedError, "DeepSeekFp8 or"),
    (BLOCK, "fp8_block", {"activation_type": GEGLU}, NotImplementedError, "activation_type must"),
    (BLOCK, "fp8_block", lambda k: {"hidden_states_scale": k["hidden_states_scale"].T},
     RuntimeError, r"hidden_states_scale must be torch.float32 \(2, 5\)"),
    (BLOCK, "fp8_block", lambda k: {"hidden_states_scale": strided(k["hidden_states_scale"])},
     Misuse, "hidden_states_scale must be .* contiguous"),
    (FP8, "fp8_tensor", {"use_routing_scales_on_input": True}, Misuse, "True for Llama4 and only"),
    (FP8, "fp8_tensor", lambda k: {"hidden_states": k["hidden_states"].bfloat16()}, Misuse,
     "hidden_states must be torch.float8_e4m3fn"),
    (FP8, "fp8_tensor", lambda k: {"gemm2_weights": k["gemm2_weights"].mT}, Misuse,
     "gemm2_weights"),
    (C_BF16, "bf16", in_fp64("fc1_expert_biases"), RuntimeError, "fc1_expert_biases must be torch"),
    (C_BF16, "bf16", {"fc1_expert_biases": None}, RuntimeError, "given beside the other"),
    (C_BF16, "bf16", in_bf16("token_final_scales"), RuntimeError, "token_final_scales must be"),
    (C_BF16, "bf16", lambda k: {"token_selected_experts": k["token_selected_experts"].long()},
     RuntimeError, "token_selected_experts must be torch.int32"),
    (C_BF16, "bf16", {"output_dtype": torch.float32}, RuntimeError, "bfloat16 or float16"),
    (C_BF16, "bf16", {"output_dtype": torch.float16, "fc1_expert_biases": None,
                      "fc2_expert_biases": None}, Misuse, "output_dtype must be the input's"),
    (C_BF16, "bf16", {"quant_scales": [torch.ones(E)]}, Misuse, "quant_scales must be None or"),
    (C_BF16, "bf16", {"min_latency_mode": True}, NotImplementedError, "min_latency_mode"),
    (C_BF16, "bf16", {"cluster_size": 2}, RuntimeError, "cluster_size must be 1"),
    (C_BF16, "bf16", {"ep_rank": 1}, Misuse, "ep_rank must be less than ep_size 1, got 1"),
    (C_BF16, "bf16", {"activation_type": GEGLU}, Misuse, "swiglu_alpha must be None: Geglu ignor"),
    (C_BF16, "bf16", {"use_w4_group_scaling": True}, Misuse, "use_w4_group_scaling must be left"),
    (C_BF16, "bf16", {"input_sf": torch.ones(1)}, RuntimeError, "input_sf must be None"),
    (C_BF16, "bf16", {"backend": "cake"}, ValueError, "backend must be cutlass"),
    (C_BF16, "bf16", lambda k: {"fc1_expert_weights": k["fc1_expert_weights"][:, 2:]},
     RuntimeError, "fc1_expert_weights must be"),
    (C_FP8, "fp8_tensor", as_list(lambda s: s[:3]), RuntimeError, "quant_scales must be 4 of them"),
    (C_FP8, "fp8_tensor", as_list(lambda s: [*s[:3], s[3].repeat(E)]), RuntimeError,
     r"quant_scales\[3\]"),
    (C_BLOCK, "fp8_block inside", as_list(lambda s: [s[0].double(), s[1]]), Misuse, r"scales\[0\]"),
    (C_BLOCK, "fp8_block inside", {"swiglu_limit": torch.ones(E)}, Misuse, "swiglu_limit must be"),
    (C_NVFP4, "nvfp4", {"input_sf": None}, Misuse, "input_sf must be given for FP4"),
    (C_NVFP4, "nvfp4", {"swizzled_input_sf": True}, Misuse, r"input_sf must be .* \(128, 12\)"),
    (C_NVFP4, "nvfp4", {"nvfp4_4over6": object()}, Misuse, "nvfp4_4over6 must be None"),
    (C_MXFP4, "mxfp4_a8", {"input_sf": None}, RuntimeError, "input_sf must be given for MXFP8"),
    (C_MXFP4, "mxfp4_a8", {"use_mxfp8_act_scaling": False}, Misuse, "use_mxfp8_act_scaling must"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "inputs", "change", "error", "said"), REFUSED)
def test_refusals(recipe, inputs, change, error, said):
    with stand_in.installed(VERSION) as fake:
        example = Example.of(fake, BY_INPUTS[recipe, inputs], inputs)
        with pytest.raises(error, match=f"{example.op}: .*{said}") as raised:
            example.run(**(change(example.keywords) if callable(change) else change))
        assert type(raised.value) is error  # not a subclass of it


@pytest.mark.parametrize("case", [case for case in CASES if "trtllm" in case.recipe], ids=str)
def test_no_tokens_are_refused(case):
    with stand_in.installed(VERSION) as fake:
        example = Example.of(fake, case, INPUTS[case.recipe, case.format][0], num=0)
        with pytest.raises(RuntimeError, match="hidden_states must be of 1 token or more, got 0"):
            example.run()


def test_alpha_belongs_to_swiglu():
    with stand_in.installed(VERSION) as fake:
        example = Example.of(fake, OF[BF16], "bf16", STEP)
        assert example.error(example.run()) < 1
        with pytest.raises(ValueError, match="gemm1_alpha must be None for SwigluStep"):
            example.run(gemm1_alpha=torch.ones(E))


def test_llama4_means_weights_on_the_input():
    with stand_in.installed(VERSION) as fake:
        example = Example.of(fake, OF[FP8], "fp8_tensor", k=1)
        with pytest.raises(Misuse, match="True for Llama4 and only then, got False"):
            example.run(routing_method_type=LLAMA4)


def test_an_environment_variable_must_not_decide():
    with stand_in.installed(VERSION) as fake:
        example = Example.of(fake, OF[FP4], "nvfp4")
        del example.keywords["nvfp4_4over6"]
        with pytest.raises(Misuse, match="nvfp4_4over6 must be None, or the environment decides"):
            example.run()


CAPABILITIES = [
    (BF16, "bf16", {(10, 0): None, (10, 3): None, (9, 0): RuntimeError, (12, 0): RuntimeError}),
    (FP4, "mxfp4_a16", {(10, 0): None, (10, 3): RuntimeError}),
    (C_BLOCK, "fp8_block inside", {(9, 0): None, (10, 0): NotImplementedError}),
    (C_NVFP4, "nvfp4", {(10, 0): None, (9, 0): RuntimeError}),
    (C_BF16, "bf16", {(9, 0): None, (10, 0): None}),
]


@pytest.mark.parametrize(("recipe", "inputs", "capabilities"), CAPABILITIES)
def test_devices(recipe, inputs, capabilities):
    for capability, error in capabilities.items():
        with stand_in.installed(VERSION, capability=capability) as fake:
            example = Example.of(fake, BY_INPUTS[recipe, inputs], inputs)
            if error is None:
                assert example.error(example.run()) < 1
            else:
                with pytest.raises(error, match=f"device must be .*, got .{capability[0]}, "):
                    example.run()


@pytest.mark.parametrize(
    ("recipe", "inputs", "version", "refused"),
    [(FP4, "nvfp4", "0.6.11", True), (FP4, "nvfp4", "0.6.12", False),
     (BLOCK, "fp8_block", "0.6.17", True), (BLOCK, "fp8_block", "0.6.18", False)],
)  # fmt: skip
def test_old_versions_take_packed_ids_alone(recipe, inputs, version, refused):
    with stand_in.installed(version) as fake:
        example = Example.of(fake, BY_INPUTS[recipe, inputs], inputs)
        example.keywords.pop("nvfp4_4over6", None)
        if refused:
            with pytest.raises(TypeError, match="topk_ids must be packed before 0.6.1"):
                example.run()
        else:
            assert example.error(example.run()) < 1


@pytest.mark.parametrize("version", recorded_versions(), ids=str)
def test_every_version_has_its_functions_and_enums(version):
    with stand_in.installed(str(version)) as fake:
        assert importlib.util.find_spec("flashinfer") is not None
        assert importlib.metadata.version("flashinfer-python") == str(version)
        top = importlib.import_module("flashinfer")
        assert top.__version__ == str(version) and fake.version == version
        for module, functions in ENTRY_POINTS.items():
            found = importlib.import_module(module)
            assert found.__spec__.name == module
            for function in functions:
                wanted = signature(version, function)
                assert hasattr(found, function) == (wanted is not None), function
                if wanted is not None:
                    assert inspect.signature(getattr(found, function)) == wanted
        for enum in ENUMS:
            place = top if enum == "SfLayout" else top.fused_moe
            members = {member.name: int(member) for member in getattr(place, enum, ())}
            assert members == enum_members(version, enum)


@pytest.mark.parametrize("version", ["0.5.3", "0.8.0", "0.0.0+unknown"])
def test_versions_that_nobody_recorded_have_nothing(version):
    with stand_in.installed(version):
        fused_moe = importlib.import_module("flashinfer.fused_moe")
        assert importlib.metadata.version("flashinfer-python") == version
        assert not hasattr(fused_moe, "cutlass_fused_moe")


def test_what_was_there_before_comes_back():
    before, path = ModuleType("flashinfer"), list(sys.meta_path)
    sys.modules["flashinfer"] = before
    try:
        with pytest.raises(KeyError):
            with stand_in.installed(VERSION):
                assert importlib.import_module("flashinfer") is not before
                with stand_in.installed("0.6.12"):
                    assert importlib.metadata.version("flashinfer_python") == "0.6.12"
                assert importlib.metadata.version("FlashInfer-Python") == VERSION
                raise KeyError
        assert sys.modules["flashinfer"] is before
        assert "flashinfer.fused_moe" not in sys.modules and sys.meta_path == path
    finally:
        del sys.modules["flashinfer"]


def test_calls_are_by_keyword_and_complete():
    with stand_in.installed(VERSION) as fake:
        example = Example.of(fake, OF[BF16], "bf16", SWIGLU)
        function = importlib.import_module("flashinfer.fused_moe").trtllm_bf16_routed_moe
        keywords = dict(example.keywords)
        first = keywords.pop("topk_ids")
        with pytest.raises(Misuse, match="must be called by keyword"):
            function(first, **keywords)
        with pytest.raises(TypeError, match="missing a required argument: 'topk_ids'"):
            function(**keywords)
        with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
            function(topk_ids=first, bias=None, **keywords)
        assert fake.calls == []


def test_misuse_is_not_swallowed():
    """A fall-back that catches what an entry point raises must not hide it."""
    assert not issubclass(Misuse, Exception)
    with stand_in.installed(VERSION):
        with pytest.raises(Misuse, match="fp4_quantize: the stand-in doesn't compute it"):
            importlib.import_module("flashinfer").fp4_quantize(torch.zeros(1))


@pytest.mark.parametrize(("case", "inputs"), VARIANTS, ids=str)
def test_results_are_tensors_or_lists_as_of_old(case, inputs):
    with stand_in.installed(VERSION) as fake:
        example = Example.of(fake, case, inputs)
        function = getattr(importlib.import_module("flashinfer.fused_moe"), example.op)
        result = function(**example.keywords)
    is_list = "fp4" in example.op or "cutlass" in example.op
    assert isinstance(result, list) == is_list
    result = result[0] if is_list else result
    assert result.dtype == example.tokens.x.dtype and len(result) == T
