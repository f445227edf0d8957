"""The stand-in answers right calls as the layer would, and a call with one thing wrong as no layer.

Weights come from tmoe's recipes, the truth from the layer that they were made of.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tmoe
from tests.backends.flashinfer import stand_in
from tests.backends.flashinfer.calling import (
    INPUTS,
    VARIANTS,
    E,
    Example,
    T,
    Tokens,
    call_of,
    errors,
    has_kernel,
    packed,
    run,
    truth,
)
from tests.backends.flashinfer.cases import LAYERS, OF, SWIGLU, make, prepared
from tests.backends.flashinfer.wrong_calls import wrong_calls
from tmoe.formats import swizzle_scale

RIGHT = [
    (case, activation, bias, interleaved, inputs)
    for case, activation, bias, interleaved in LAYERS
    for inputs in INPUTS[case.recipe, case.format]
    if has_kernel(case, activation, inputs)
]


TRTLLM = [(case, inputs) for case, inputs in VARIANTS if "trtllm" in case.recipe]


@pytest.fixture(scope="module")
def fake():
    with stand_in.installed("0.7.4", faults=()) as fake:
        yield fake


@pytest.mark.parametrize(("case", "activation", "bias", "interleaved", "inputs"), RIGHT, ids=str)
def test_the_answer_is_the_layers(fake, case, activation, bias, interleaved, inputs):
    experts, tokens = make(case, activation, bias, interleaved, E), Tokens.of(case)
    op, keywords, x = call_of(fake, case, prepared(case, experts), activation, inputs, tokens)
    got = run(op, keywords)
    assert max(errors(got[:, : case.H], truth(case, experts, inputs, x, tokens))) < 1
    assert (got[:, case.H :] == 0).all()
    assert fake.calls[-1] == (op, keywords)


@pytest.mark.parametrize(("case", "inputs"), VARIANTS, ids=str)
def test_whatever_is_wrong_is_noticed(fake, case, inputs):
    """Refused, or answered with at least twice the error that a right call may have."""
    example = Example.of(fake, case, inputs)
    want = example.truth()
    assert max(errors(example.run(), want)) < 1
    unnoticed, refused, answered = [], 0, 0
    for name, wrong in wrong_calls(example.keywords, example.tokens):
        try:
            got = run(example.op, wrong)[:, : case.H]
        except (RuntimeError, TypeError, ValueError, stand_in.Misuse):
            refused += 1
            continue
        answered += 1
        if got.shape == want.shape and max(errors(got, want)) < 2:
            unnoticed.append(name)
    assert not unnoticed
    assert refused >= 20 and answered >= 20


@pytest.mark.parametrize("recipe", ["trtllm_mxfp8", "trtllm_fp4"])
def test_swizzled_scales_of_128_tokens_look_like_linear_ones(fake, recipe):
    """No launcher can tell them apart; the answer does."""
    case = OF[recipe]
    example = Example.of(fake, case, INPUTS[recipe, case.format][0], num=128)
    scale = example.keywords["hidden_states_scale"]
    few = replace(example.tokens, weights=example.tokens.weights[:T], ids=example.tokens.ids[:T])
    want = truth(case, example.experts, example.inputs, example.x[:T], few)
    assert max(errors(example.run()[:T], want)) < 1
    swizzled = swizzle_scale(scale)
    assert max(errors(example.run(hidden_states_scale=swizzled)[:T], want)) > 2
    with pytest.raises(stand_in.Misuse, match="hidden_states_scale must be"):
        example.run(hidden_states_scale=swizzled.flatten())


@pytest.mark.parametrize(("case", "inputs"), VARIANTS, ids=str)
def test_windows_of_experts_add_up(fake, case, inputs):
    """And ids outside, -1 among them, contribute nothing."""
    whole = Example.of(fake, case, inputs)
    ids = whole.tokens.ids.clone()
    ids[0, 0] = -1
    total = 0
    for rank, first in enumerate((0, E // 2)):
        window = slice(first, first + E // 2)
        cut = {
            name: value[window] if name in PER_EXPERT and value is not None else value
            for name, value in whole.keywords.items()
        }
        if "topk_ids" in cut:
            cut |= {"local_expert_offset": first, "local_num_experts": E // 2}
            cut["topk_ids"] = (ids, whole.tokens.weights)
        else:
            scales = cut["quant_scales"]
            cut["quant_scales"] = [s[window] if s.ndim else s for s in scales]
            cut |= {"ep_size": 2, "ep_rank": rank, "token_selected_experts": ids}
        total = total + whole.run(**cut).double()
    assert whole.error(total, tokens=replace(whole.tokens, ids=ids)) < 1


PER_EXPERT = [
    *(f"gemm{n}_{part}" for n in (1, 2) for part in ("weights", "weights_scale", "bias")),
    *(f"fc{n}_expert_{part}" for n in (1, 2) for part in ("weights", "biases")),
    *(f"{kind}_{c}" for kind in ("gemm1", "swiglu") for c in ("alpha", "beta", "limit")),
    *(f"output{n}_{s}" for n in (1, 2) for s in ("scale_scalar", "scales_scalar")),
    "gemm1_clamp_limit", "output1_scale_gate_scalar", "output1_scales_gate_scalar",
]  # fmt: skip


@pytest.mark.parametrize(("case", "inputs"), TRTLLM, ids=str)
def test_packed_ids_are_ids_and_weights(fake, case, inputs):
    example = Example.of(fake, case, inputs)
    ids, weights = example.tokens.ids.clone(), example.tokens.weights
    ids[:2, 0] = -1
    wanted = example.run(topk_ids=(ids, weights))
    assert torch.equal(example.run(topk_ids=packed(ids, weights)), wanted)


def test_the_second_bias_is_added_on_one_rank(fake):
    example = Example.of(fake, OF["cutlass_bf16"], "bf16")
    assert example.error(example.run(tp_size=2, tp_rank=0)) < 1
    assert example.error(example.run(tp_size=2, tp_rank=1), down_bias=False) < 1


@pytest.mark.parametrize(("case", "inputs"), VARIANTS, ids=str)
def test_the_output_is_written_where_it_is_wanted(fake, case, inputs):
    """It may be narrower than H where H is filled up."""
    example = Example.of(fake, case, inputs)
    output = torch.full((T, case.H), torch.nan, dtype=example.tokens.x.dtype)
    assert run(example.op, example.keywords | {"output": output}).data_ptr() == output.data_ptr()
    assert example.error(output) < 1
    with pytest.raises(ValueError, match="output must be"):
        example.run(output=output.float())


def test_llama4_scales_the_input(fake):
    """SwiGLU isn't homogeneous, so scaling the output instead is far off."""
    example = Example.of(fake, OF["trtllm_fp8_per_tensor"], "fp8_tensor", SWIGLU, k=1)
    llama4 = {
        "routing_method_type": fake.enums["RoutingMethodType"].Llama4,
        "use_routing_scales_on_input": True,
    }
    got = example.run(**llama4)
    assert example.error(got, on_input=True) < 1 and example.error(got) > 2
    logits = torch.randn(T, E)
    given = example.keywords | llama4 | {"routing_logits": logits}
    del given["topk_ids"]
    got = run("trtllm_fp8_per_tensor_scale_moe", given)
    best = logits.max(1, keepdim=True)
    weights = torch.sigmoid(best.values).bfloat16().float()
    tokens = Tokens(example.tokens.x, weights, best.indices.int())
    assert example.error(got, tokens=tokens, on_input=True) < 1


METHODS = (
    "Default Renormalize RenormalizeNaive TopK Sigmoid SigmoidRenorm TopKSigmoid MiniMax2 "
    "DeepSeekV3"
).split()


@pytest.mark.parametrize(
    ("method", "grouped"), [*((method, False) for method in METHODS), ("DeepSeekV3", True)]
)
def test_logits_are_routed_as_tmoe_does(fake, method, grouped):
    groups = {"n_group": 4, "topk_group": 2} if grouped else {"n_group": 1, "topk_group": 1}
    biased = method in ("MiniMax2", "DeepSeekV3")
    logits, bias = torch.randn(T, E), torch.randn(E).bfloat16().float() if biased else None
    logits[0] = 1.0  # ties
    factor = {"scaling_factor": 2.5} if biased else {}
    routing = tmoe.Routing(E, 2, method, **factor, **(groups if grouped else {}))
    with tmoe.options(backend="torch"):
        weights, ids = tmoe.route(logits, routing, bias=bias)
    example = Example.of(fake, OF["trtllm_bf16"], "bf16")
    given = (
        example.keywords
        | groups
        | {
            "routing_logits": logits,
            "routing_bias": bias,
            "routed_scaling_factor": 2.5 if biased else None,
            "routing_method_type": fake.enums["RoutingMethodType"][method],
        }
    )
    del given["topk_ids"]
    tokens = Tokens(example.tokens.x, weights.bfloat16().float(), ids)
    assert example.error(run("trtllm_bf16_moe", given), tokens=tokens) < 1


def test_groups_round_the_bias_to_bf16(fake):
    """So that two experts tie that fp32 would tell apart."""
    bias = torch.tensor([1.0, 1.002, 0, 0, 0, 0, 0, 0])
    example = Example.of(fake, OF["trtllm_bf16"], "bf16", k=1)
    given = example.keywords | {
        "routing_logits": torch.zeros(T, E),
        "routing_bias": bias,
        "routing_method_type": fake.enums["RoutingMethodType"].DeepSeekV3,
    }
    del given["topk_ids"]
    for groups, expert in (({"n_group": 2, "topk_group": 1}, 0), ({}, 1)):
        ids = torch.full((T, 1), expert, dtype=torch.int32)
        tokens = Tokens(example.tokens.x, torch.ones(T, 1), ids)
        assert example.error(run("trtllm_bf16_moe", given | groups), tokens=tokens) < 1
