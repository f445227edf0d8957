"""Bad input: every message names the function, the argument, what was wanted and what came."""

from __future__ import annotations

import re

import pytest
import torch

import tmoe

T, H, I, E, K = 4, 16, 8, 6, 2


def experts(**changes):
    arguments = dict(
        x=torch.randn(T, H),
        gate_up_proj=torch.randn(E, 2 * I, H),
        down_proj=torch.randn(E, H, I),
        topk_weights=torch.rand(T, K),
        topk_ids=torch.zeros(T, K, dtype=torch.int32),
    )
    return arguments | changes


BAD_EXPERTS = {
    "x-width": (dict(x=torch.randn(T, 17)), ValueError, "x must be of shape (..., 16)", "(4, 17)"),
    "x-list": (dict(x=[1.0]), TypeError, "x must be a Tensor, got list", ""),
    "x-int": (
        dict(x=torch.zeros(T, H, dtype=torch.int32)),
        TypeError,
        "x must have dtype",
        "int32",
    ),
    "x-complex": (
        dict(x=torch.zeros(T, H, dtype=torch.cfloat)),
        TypeError,
        "x must have",
        "complex",
    ),
    "ungated-rows (WL04)": (
        dict(gate_up_proj=torch.randn(E, I, H)),
        ValueError,
        "gate_up_proj must be of shape (6, 16, 16) for swiglu",
        "(6, 8, 16)",
    ),
    "gated-rows (WL04)": (
        dict(activation="relu2"),
        ValueError,
        "gate_up_proj must be of shape (6, 8, 16) for relu2",
        "(6, 16, 16)",
    ),
    "down-2-D": (
        dict(down_proj=torch.randn(H, I)),
        ValueError,
        "down_proj must be of shape (E, H, I)",
        "",
    ),
    "no-expert": (dict(down_proj=torch.randn(0, H, I)), ValueError, "down_proj", "(0, 16, 8)"),
    "weights-dtype": (
        dict(down_proj=torch.randn(E, H, I).half()),
        TypeError,
        "down_proj must have x's dtype torch.float32",
        "torch.float16",
    ),
    "bias-shape": (
        dict(down_bias=torch.randn(E, I)),
        ValueError,
        "down_bias must be of shape (6, 16)",
        "(6, 8)",
    ),
    "bias-dtype": (
        dict(gate_up_bias=torch.randn(E, 2 * I).bfloat16()),
        TypeError,
        "gate_up_bias",
        "bfloat16",
    ),
    "ids-float (NC04)": (
        dict(topk_ids=torch.zeros(T, K)),
        TypeError,
        "topk_ids must have dtype int32 or int64",
        "",
    ),
    "ids-uint8 (NC04)": (
        dict(topk_ids=torch.zeros(T, K, dtype=torch.uint8)),
        TypeError,
        "topk_ids",
        "uint8",
    ),
    "ids-rows": (
        dict(topk_ids=torch.zeros(5, K, dtype=torch.int32)),
        ValueError,
        "topk_ids",
        "(5, 2)",
    ),
    "weights-rows (NC06)": (
        dict(topk_weights=torch.rand(3, K)),
        ValueError,
        "topk_weights",
        "(3, 2)",
    ),
    "weights-int": (
        dict(topk_weights=torch.ones(T, K, dtype=torch.int32)),
        TypeError,
        "topk_weights",
        "int32",
    ),
    "k-above-E (RT19)": (
        dict(topk_ids=torch.zeros(T, 7, dtype=torch.int32), topk_weights=torch.rand(T, 7)),
        ValueError,
        "topk_ids must be of at least 1 and at most num_experts=6 columns",
        "got 7",
    ),
    "k-zero (RT19)": (
        dict(topk_ids=torch.zeros(T, 0, dtype=torch.int32), topk_weights=torch.rand(T, 0)),
        ValueError,
        "topk_ids",
        "got 0",
    ),
    "activation-name": (dict(activation="swish"), ValueError, "one of swiglu", "'swish'"),
    "activation-type": (
        dict(activation=3),
        TypeError,
        "activation must be a str or Activation",
        "int",
    ),
    "interleaved-ungated": (
        dict(activation="relu2", gate_up_proj=torch.randn(E, I, H), interleaved=True),
        ValueError,
        "interleaved must be False for relu2",
        "",
    ),
    "scheme": (dict(scheme="fp8"), ValueError, "scheme must be None or bf16", "'fp8'"),
    "flag-type": (dict(weight_on_input=1), TypeError, "weight_on_input must be a bool", "int"),
    "first-expert": (dict(first_expert=-1), ValueError, "first_expert must be at least 0", "-1"),
    "first-expert-type": (
        dict(first_expert=0.0),
        TypeError,
        "first_expert must be an int",
        "float",
    ),
    "window": (
        dict(first_expert=4, num_experts=8),
        ValueError,
        "num_experts must be at least first_expert + E = 4 + 6",
        "got 8",
    ),
    "device (EN07)": (
        dict(down_proj=torch.randn(E, H, I, device="meta")),
        ValueError,
        "down_proj must be on x's device cpu",
        "meta",
    ),
    "device-of-ids": (
        dict(topk_ids=torch.zeros(T, K, dtype=torch.int32, device="meta")),
        ValueError,
        "topk_ids must be on x's device cpu",
        "meta",
    ),
    "out-shape": (
        dict(out=torch.empty(T, 8)),
        ValueError,
        "out must be of shape (4, 16)",
        "(4, 8)",
    ),
    "out-dtype": (
        dict(out=torch.empty(T, H).half()),
        TypeError,
        "out must have dtype float32",
        "float16",
    ),
    "out-strided": (dict(out=torch.empty(H, T).t()), ValueError, "out must be contiguous", ""),
    "out-device": (
        dict(out=torch.empty(T, H, device="meta")),
        ValueError,
        "out must be on x's device",
        "meta",
    ),
    "out-grad": (
        dict(out=torch.empty(T, H), x=torch.randn(T, H, requires_grad=True)),
        ValueError,
        "out must be None while gradients are needed",
        "",
    ),
}


@pytest.mark.parametrize("case", BAD_EXPERTS)
def test_fused_experts(case):
    changes, error, wanted, got = BAD_EXPERTS[case]
    with pytest.raises(error) as caught:
        tmoe.fused_experts(**experts(**changes))
    message = str(caught.value)
    assert wanted in message and got in message, message
    assert message.startswith("fused_experts: ")


def test_out_may_not_be_an_input():
    x = torch.randn(T, H)
    with pytest.raises(ValueError, match="fused_experts: out must be apart from the inputs"):
        tmoe.fused_experts(**experts(x=x), out=x)
    both = torch.randn(2 * T, H)
    tmoe.fused_experts(**experts(x=both[:T]), out=both[T:])


def gemm(**changes):
    arguments = dict(
        a=torch.randn(5, H), b=torch.randn(2, I, H), expert_offsets=torch.tensor([0, 2, 5]).int()
    )
    return arguments | changes


BAD_GEMM = {
    "a-width": (dict(a=torch.randn(5, 3)), ValueError, "a must be of shape (S, 16)", "(5, 3)"),
    "a-3-D": (dict(a=torch.randn(1, 5, H)), ValueError, "a must be of shape (S, 16)", "(1, 5, 16)"),
    "b-2-D": (dict(b=torch.randn(I, H)), ValueError, "b must be of shape (E, N, D)", "(8, 16)"),
    "b-dtype": (dict(b=torch.randn(2, I, H).half()), TypeError, "b must have a's dtype", "float16"),
    "offsets-int64": (
        dict(expert_offsets=torch.tensor([0, 2, 5])),
        TypeError,
        "expert_offsets must have dtype int32",
        "int64",
    ),
    "inclusive-offsets": (
        dict(expert_offsets=torch.tensor([2, 5]).int()),
        ValueError,
        "expert_offsets must be of shape (3,)",
        "(2,)",
    ),
    "decreasing": (
        dict(expert_offsets=torch.tensor([0, 4, 3]).int()),
        ValueError,
        "expert_offsets must be from 0",
        "[0, 4, 3]",
    ),
    "past-the-end": (
        dict(expert_offsets=torch.tensor([0, 4, 6]).int()),
        ValueError,
        "to at most S = 5",
        "[0, 4, 6]",
    ),
    "not-from-zero": (
        dict(expert_offsets=torch.tensor([1, 4, 5]).int()),
        ValueError,
        "expert_offsets must be from 0",
        "[1, 4, 5]",
    ),
    "bias": (dict(bias=torch.randn(2, H)), ValueError, "bias must be of shape (2, 8)", "(2, 16)"),
    "device": (
        dict(b=torch.randn(2, I, H, device="meta")),
        ValueError,
        "b must be on a's device cpu",
        "meta",
    ),
    "out": (dict(out=torch.empty(5, H)), ValueError, "out must be of shape (5, 8)", "(5, 16)"),
}


@pytest.mark.parametrize("case", BAD_GEMM)
def test_grouped_gemm(case):
    changes, error, wanted, got = BAD_GEMM[case]
    with pytest.raises(error, match=re.escape(wanted)) as caught:
        tmoe.grouped_gemm(**gemm(**changes))
    assert got in str(caught.value) and str(caught.value).startswith("grouped_gemm: ")


@pytest.mark.parametrize(
    "logits, routing, bias, error, message",
    [
        (
            torch.randn(T, 5),
            "Default",
            None,
            ValueError,
            r"logits must be of shape \(..., 6\), got \(4, 5\)",
        ),
        (torch.ones(T, E).int(), "Default", None, TypeError, "logits must have dtype float32 or"),
        (
            torch.randn(T, E),
            "Default",
            torch.randn(E),
            ValueError,
            "bias must be None with Default",
        ),
        (
            torch.randn(T, E),
            "DeepSeekV3",
            torch.randn(5),
            ValueError,
            r"bias must be of shape \(6,\), got \(5,\)",
        ),
        (
            torch.randn(T, E),
            "DeepSeekV3",
            torch.randn(E, device="meta"),
            ValueError,
            "bias must be on logits's",
        ),
    ],
)
def test_route(logits, routing, bias, error, message):
    with pytest.raises(error, match=f"route: {message}"):
        tmoe.route(logits, tmoe.Routing(E, K, routing), bias=bias)


def test_route_without_a_routing():
    with pytest.raises(TypeError, match="route: routing must be a Routing, got str"):
        tmoe.route(torch.randn(T, E), "Default")


def test_moe():
    x, gate_up, down = (experts()[name] for name in ("x", "gate_up_proj", "down_proj"))
    logits, routing = torch.randn(T, E), tmoe.Routing(E, K, "Default")
    with pytest.raises(ValueError, match="moe: num_experts must be 6, as in routing, got 8"):
        tmoe.moe(x, logits, gate_up, down, routing, num_experts=8)
    with pytest.raises(TypeError, match="moe: routing must be a Routing, got tuple"):
        tmoe.moe(x, logits, gate_up, down, (E, K))
    with pytest.raises(TypeError, match="unexpected keyword argument 'biass'"):
        tmoe.moe(x, logits, gate_up, down, routing, biass=None)
    with pytest.raises(ValueError, match="topk_ids must be"):
        tmoe.moe(x, logits[:3], gate_up, down, routing)
