"""Faults of the stand-in: each does what its name says, and a comparison of answers sees it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.backends.flashinfer import stand_in
from tests.backends.flashinfer.calling import VARIANTS, E, Example, T, errors, run
from tests.backends.flashinfer.cases import OF, SWIGLU
from tests.backends.flashinfer.stand_in import faults_of

VERSION = "0.7.4"
ALWAYS = {"output_rows_unwritten", "near_zero_scales_nan"}
ROUTING = {"deepseek_bias_cancels", "deepseek_grouped_no_epsilon"}
OF_VERSION = {
    "0.5.2": ALWAYS | ROUTING | {
        "missing_tier", "deepseek_ungrouped_no_epsilon", "minimax_ignores_factor",
        "bf16_illegal_address",
    },
    "0.6.8": ALWAYS | ROUTING | {
        "llama4_weight_twice", "per_tensor_raises", "missing_tier",
        "deepseek_ungrouped_no_epsilon", "minimax_ignores_factor", "bf16_illegal_address",
    },
    "0.6.12": ALWAYS | ROUTING | {
        "llama4_weight_twice", "missing_tier", "deepseek_ungrouped_no_epsilon",
        "minimax_ignores_factor", "bf16_illegal_address",
    },
    "0.6.15": ALWAYS | ROUTING | {"llama4_weight_twice", "missing_tier", "bf16_illegal_address"},
    "0.6.16": ALWAYS | ROUTING | {"bf16_illegal_address"},
    "0.6.17": ALWAYS | {"deepseek_bias_cancels", "bf16_illegal_address"},
    "0.6.18.post1": ALWAYS,
    "0.7.4": ALWAYS,
}  # fmt: skip


@pytest.mark.parametrize("version", OF_VERSION)
def test_versions_have_the_faults_that_are_known_of_them(version):
    assert faults_of(version) == OF_VERSION[version]
    with stand_in.installed(version) as fake:
        assert fake.faults == OF_VERSION[version]
    with stand_in.installed(version, faults=["raises"]) as fake:
        assert fake.faults == {"raises"}


def test_a_fault_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="faults must be of .*, got shuffled"):
        with stand_in.installed(VERSION, faults=["shuffled"]):
            pass


def has_effect(fault, example):
    """Not every number format has what a fault is about."""
    if fault == "shuffle_ignored":
        return "trtllm" in example.op and example.keywords.get("use_shuffled_weight", True)
    if fault == "limit_in_raw_units":
        limited = any(example.keywords.get(f"{k}_limit") is not None for k in LIMITS)
        return limited and example.case.format in ("nvfp4", "fp8_tensor")
    return True


LIMITS = ("gemm1_clamp", "swiglu")
ARTIFICIAL = ("gate_up_swapped", "shuffle_ignored", "weight_twice", "limit_in_raw_units")


@pytest.mark.parametrize("fault", [*ARTIFICIAL, "nan_answer"])
@pytest.mark.parametrize(("case", "inputs"), VARIANTS, ids=str)
def test_a_wrong_answer_is_far_from_the_right_one(case, inputs, fault):
    with stand_in.installed(VERSION, faults=[fault]) as fake:
        example = Example.of(fake, case, inputs)
        error = example.error(example.run())
    assert error > 2 if has_effect(fault, example) else error < 1


def test_it_raises_on_demand():
    with stand_in.installed(VERSION, faults=["raises"]) as fake:
        example = Example.of(fake, OF["trtllm_bf16"], "bf16")
        with pytest.raises(RuntimeError, match="was asked to raise"):
            example.run()
    with stand_in.installed(VERSION, faults=["import_error"]):
        assert importlib.util.find_spec("flashinfer") is not None
        for name in ("flashinfer", "flashinfer.fused_moe"):
            with pytest.raises(RuntimeError, match="version does not match 0.7.4"):
                importlib.import_module(name)


def from_logits(fake, example, op, method, logits, **given):
    """The same layer, routed by FlashInfer."""
    keywords = {
        **example.keywords, "routing_logits": logits, "routing_bias": None,
        "routing_method_type": fake.enums["RoutingMethodType"][method], **given,
    }  # fmt: skip
    del keywords["topk_ids"]
    return run(op, keywords)[:, : example.case.H]


def per_tensor(fake, k=1):
    """From logits it is there before it is with ids."""
    return Example.of(fake, OF["trtllm_fp8_per_tensor"], "fp8_tensor", SWIGLU, k=k)


LOGITS = "trtllm_fp8_per_tensor_scale_moe"


@pytest.mark.parametrize("version", ["0.6.12", "0.6.15", "0.6.16", VERSION])
def test_llama4_weighs_twice_in_old_versions(version):
    with stand_in.installed(version) as fake:
        example = per_tensor(fake)
        example.keywords.pop("gemm1_clamp_limit", None)
        logits = torch.full((T, E), -9.0)
        logits[torch.arange(T), example.tokens.ids[:, 0].long()] = -1.0
        got = from_logits(fake, example, LOGITS, "Llama4", logits, use_routing_scales_on_input=True)
        weight = torch.sigmoid(torch.tensor(-1.0)).bfloat16()
        example.tokens.weights.fill_(weight)
        right = example.truth(on_input=True)
    wanted = right * (weight.double() if version < "0.6.16" else 1)
    assert max(errors(got, wanted)) < 1


@pytest.mark.parametrize("version", ["0.6.8", "0.6.8.post1"])
def test_the_per_tensor_function_raises_in_one_version(version):
    with stand_in.installed(version) as fake:
        example = per_tensor(fake)
        if version == "0.6.8":
            with pytest.raises(TypeError, match="expected 25 but got 24"):
                from_logits(fake, example, LOGITS, "TopK", torch.randn(T, E))
        else:
            assert from_logits(fake, example, LOGITS, "TopK", torch.randn(T, E)).isfinite().all()


@pytest.mark.parametrize("version", ["0.6.17", "0.6.18"])
def test_bf16_reads_an_illegal_address_in_old_versions(version):
    with stand_in.installed(version) as fake:
        example = Example.of(fake, OF["trtllm_bf16"], "bf16", SWIGLU)
        if version == "0.6.17":
            with pytest.raises(RuntimeError, match="illegal memory access"):
                example.run()
        else:
            assert example.error(example.run()) < 1


GROUPS = {"n_group": 4, "topk_group": 2}
BIAS = torch.linspace(0.5, 4, E)
ROUTED_WRONG = [  # fault, method, logits, what is given, what the right answer is to the wrong one
    ("deepseek_ungrouped_no_epsilon", "DeepSeekV3", -100.0, {"routing_bias": BIAS}, "nan"),
    ("deepseek_grouped_no_epsilon", "DeepSeekV3", -100.0, {"routing_bias": BIAS, **GROUPS}, "nan"),
    ("deepseek_bias_cancels", "DeepSeekV3", -1.0, {"routing_bias": BIAS * 1e8}, "zero"),
    ("minimax_ignores_factor", "MiniMax2", 1.0, {"routed_scaling_factor": 4.0}, "quarter"),
]


@pytest.mark.parametrize(("fault", "method", "logit", "given", "answer"), ROUTED_WRONG)
def test_routing_goes_wrong_as_it_did(fault, method, logit, given, answer):
    logits, answers = torch.full((T, E), logit), []
    for faults in ((), (fault,)):
        with stand_in.installed(VERSION, faults=faults) as fake:
            example = per_tensor(fake, k=2)
            answers.append(from_logits(fake, example, LOGITS, method, logits, **given).double())
    right, wrong = answers
    assert right.isfinite().all()
    if answer == "nan":
        assert wrong.isnan().all() and (right == 0).all()
    elif answer == "zero":
        assert (wrong == 0).all() and (right != 0).any()
    else:
        torch.testing.assert_close(wrong * 4, right, rtol=0.02, atol=0)


def test_more_than_was_compiled_for_is_refused_or_nan():
    for faults in ((), ("missing_tier",)):
        with stand_in.installed(VERSION, faults=faults) as fake:
            example = per_tensor(fake, k=8)
            example.keywords["top_k"] = 8
            many = torch.randn(T, E)
            assert from_logits(fake, example, LOGITS, "Default", many).isfinite().all()
            wide = {name: v.repeat(2, *[1] * (v.ndim - 1)) for name, v in per_expert(example)}
            wide |= {"num_experts": 2 * E, "local_num_experts": 2 * E, "top_k": 9}
            many = torch.randn(T, 2 * E)
            if faults:
                assert from_logits(fake, example, LOGITS, "Default", many, **wide).isnan().all()
            else:
                with pytest.raises(RuntimeError, match="num_experts must be of a compiled size"):
                    from_logits(fake, example, LOGITS, "Default", many, **wide)
            # The large tier has room.
            got = from_logits(fake, example, LOGITS, "Renormalize", many, **wide)
            assert got.isfinite().all()


def per_expert(example):
    return [
        (name, value)
        for name, value in example.keywords.items()
        if name.startswith(("gemm", "output")) and value is not None
    ]


def cutlass(fake, recipe, inputs):
    return Example.of(fake, OF[recipe], inputs)


def test_scales_are_ignored_without_the_flag():
    """bf16 inputs with e4m3 weights: misuse, or what the real function is believed to do."""
    flag = {"use_deepseek_fp8_block_scale": False}
    with stand_in.installed(VERSION) as fake:
        with pytest.raises(stand_in.Misuse, match="use_deepseek_fp8_block_scale must be True"):
            cutlass(fake, "cutlass_fp8_block", "fp8_block inside").run(**flag)
    with stand_in.installed(VERSION, faults=["scales_ignored"]) as fake:
        example = cutlass(fake, "cutlass_fp8_block", "fp8_block inside")
        assert example.error(example.run()) < 1
        got = example.run(**flag)
        scales = [s * torch.nan for s in example.keywords["quant_scales"]]
        assert got.isfinite().all() and example.error(got) > 2
        assert torch.equal(example.run(**flag, quant_scales=scales), got)


@pytest.mark.parametrize("faults", [None, ()])
def test_scales_next_to_zero_are_nan(faults):
    with stand_in.installed(VERSION, faults) as fake:
        example = cutlass(fake, "cutlass_fp8_block", "fp8_block inside")
        example.keywords["quant_scales"][1][0, 0, 0] = 1e-11
        assert example.run().isnan().all() == (faults is None)


@pytest.mark.parametrize("faults", [None, ()])
def test_alltoall_leaves_rows_alone(faults):
    with stand_in.installed(VERSION, faults) as fake:
        example = cutlass(fake, "cutlass_bf16", "bf16")
        ids = torch.arange(T * 2).view(T, 2).int() % (2 * E)
        ids[3] = -1
        got = example.run(token_selected_experts=ids, ep_size=2, enable_alltoall=True)
        local = (ids >= 0) & (ids < E)
        wanted = ~local.any(1) if faults is None else torch.zeros(T, dtype=torch.bool)
        assert local.any(1).any() and torch.equal(got.isnan().any(1), wanted)
