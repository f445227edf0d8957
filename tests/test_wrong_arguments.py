"""Every argument of every public function, given what it can't take: a sentence names the argument.

What a value is wrong in (type, layout, dtype, size) differs from argument to argument, so a value
that happens to fit may pass. Those in NEVER fit nowhere.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

import tmoe

T, E, K, H, I = 5, 4, 2, 16, 8
ROUTING = tmoe.Routing(E, K, "Renormalize")

NEVER = {
    "an object": object(),
    "a dict": {},
    "a complex tensor": torch.ones(T, E, dtype=torch.complex64),
    "a sparse tensor": torch.eye(T, E).to_sparse(),
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, of a layout that people still have
    NEVER["a nested tensor"] = torch.nested.nested_tensor([torch.ones(2, E)])
WRONG = NEVER | {
    "None": None,
    "a negative number": -1,
    "more than 64 bits": 2**70,
    "a bool": True,
    "a float": 1.5,
    "NaN": math.nan,
    "a string": "none such",
    "a list": [1, 2],
    "an array": np.ones((T, E), np.float32),
    "a dtype": torch.int8,
    "a scalar tensor": torch.tensor(1.0),
    "nothing in a tensor": torch.ones(0),
    "booleans": torch.ones(T, E, dtype=torch.bool),
    "integers": torch.ones(T, E, dtype=torch.int64),
    "float8": torch.ones(T, E).to(torch.float8_e4m3fn),
    "a tensor on meta": torch.ones(T, E, device="meta"),
    "four dimensions": torch.ones(1, 1, T, E),
}


def _calls():
    """By name: the function and arguments that it takes."""
    torch.manual_seed(0)
    x, logits = torch.randn(T, H), torch.randn(T, E)
    weights, ids = tmoe.route(logits, ROUTING)
    layer = dict(x=x, gate_up_proj=torch.randn(E, 2 * I, H), down_proj=torch.randn(E, H, I))
    topk = dict(topk_weights=weights, topk_ids=ids)
    q = tmoe.quantize(torch.randn(T, 64), "mxfp8")
    unset = dict.fromkeys
    return {
        tmoe.route: dict(logits=logits, routing=ROUTING, ids_dtype=torch.int32)
        | unset(("return_probs", "return_counts"), False)
        | unset(("bias", "expert_scale", "topk_ids", "weights_dtype")),
        tmoe.fused_experts: layer
        | topk
        | dict(activation="swiglu", interleaved=False, weight_on_input=False, first_expert=0)
        | unset(("scheme", "gate_up_bias", "down_bias", "num_experts", "input_scale"))
        | unset(("hidden_scale", "gate_up_lora", "down_lora", "out_dtype", "out")),
        tmoe.moe: layer
        | dict(logits=logits, routing=ROUTING, weight_on_input=False)
        | unset(("bias", "expert_scale", "num_experts")),
        tmoe.grouped_gemm: dict(
            a=x, b=torch.randn(E, I, H), expert_offsets=torch.tensor([0, 1, 2, 3, 5]).int()
        )
        | unset(("bias", "scheme", "a_scale", "out")),
        tmoe.quantize: dict(x=q.dequantize(), format="mxfp8")
        | unset(("scale", "global_scale", "block_shape", "scale_rule")),
        tmoe.dequantize: dict(q=q, dtype=torch.float32),
        tmoe.QuantizedTensor.from_parts: dict(data=q.data, scale=q.scale, format="mxfp8")
        | unset(("shape", "global_scale")),
        tmoe.MoE: dict(hidden_size=H, intermediate_size=I, routing=ROUTING, activation="swiglu")
        | dict(scheme="bf16", shared_intermediate_size=0)
        | unset(("bias", "router_bias", "shared_expert_gate", "interleaved"), False),
        tmoe.Experts: dict(num_experts=E, hidden_size=H, intermediate_size=I)
        | dict(activation="swiglu", scheme="bf16")
        | unset(("bias", "interleaved", "weight_on_input"), False)
        | unset(("input_scale", "hidden_scale", "dtype")),
        tmoe.Router: dict(hidden_size=H, routing=ROUTING, bias=False, dtype=None),
        tmoe.MoE(H, I, ROUTING): dict(x=x, topk_ids=None),
        tmoe.Experts(E, H, I): dict(x=x, **topk),
        tmoe.Router(H, ROUTING): dict(x=x),
        tmoe.Routing: dict(num_experts=E, top_k=K, method="DeepSeekV3", n_group=1, topk_group=1)
        | dict(scaling_factor=1.0),
        tmoe.RoutingRule: dict(score="sigmoid", takes_bias=True, group_score=None, epsilon=0.0),
        tmoe.Activation: dict(name="swiglu", alpha=1.0, limit=math.inf),
        tmoe.load_balancing_loss: dict(probs=logits.softmax(-1), topk_ids=ids, mask=None),
        tmoe.router_z_loss: dict(logits=logits, mask=None),
        tmoe.pack_topk: topk,
        tmoe.unpack_topk: dict(packed=tmoe.pack_topk(ids, weights)),
        tmoe.simulate_routing: dict(num_tokens=T, num_experts=E, top_k=K, seed=0)
        | dict(distribution="uniform", skew=1.0),
        tmoe.ExpertLoad: dict(num_experts=E),
        tmoe.ExpertLoad(E).add: dict(counts=torch.ones(E, dtype=torch.int32)),
        tmoe.explain: dict(layer_or_problem=tmoe.MoE(H, I, ROUTING), num_tokens=4),
        tmoe.replace_moe: dict(model=torch.nn.Linear(2, 2), scheme=None, routers=True),
    }


CALLS = _calls()


def _name(call) -> str:
    return getattr(call, "__qualname__", f"{type(call).__name__}.forward")


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        pytest.param(c, name, id=f"{_name(c)}-{name}")
        for c, given in CALLS.items()
        for name in given
    ],
)
def test_an_argument_that_does_not_fit(call, argument):
    accepted = set()
    for what, value in WRONG.items():
        try:
            call(**CALLS[call] | {argument: value})
        except (TypeError, ValueError) as error:
            message = str(error)
            named = any(name in message for name in CALLS[call])  # it, or what it doesn't match
            assert " must " in message and named, (what, message)
        else:
            accepted.add(what)
    assert not accepted & set(NEVER)


@pytest.mark.parametrize("call", CALLS, ids=_name)
def test_what_fits_is_taken(call):
    call(**CALLS[call])
