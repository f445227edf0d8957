"""What a user's type checker is told: nothing here runs, `make lint` checks it.

A line that must be an error says so with an `ignore`, and an ignore that isn't needed is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import tmoe


def functions(x: Tensor, gate_up: Tensor, down: Tensor) -> None:
    routing = tmoe.Routing(8, 2, "Renormalize")
    weights, ids = tmoe.route(x, routing)
    assert_type(tmoe.fused_experts(x, gate_up, down, weights, ids), Tensor)
    q = tmoe.quantize(gate_up, "mxfp8")
    assert_type(q, tmoe.QuantizedTensor)
    assert_type(q.global_scale, Tensor | None)
    assert_type(tmoe.dequantize(q), Tensor)
    assert_type(tmoe.__version__, str)
    tmoe.fused_experts(x, gate_up, down, weights, [0, 1])  # type: ignore[arg-type]
    tmoe.Routing(8, 2)  # type: ignore[call-arg]


def layers(x: Tensor) -> None:
    layer = tmoe.MoE(64, 32, tmoe.Routing(8, 2, "Renormalize"), dtype=torch.bfloat16)
    assert_type(layer.experts.gate_up_proj, nn.Parameter)
    assert_type(layer.experts.down_proj_bias, nn.Parameter | None)
    with tmoe.watch_load(layer) as load:
        layer(x)
    print(load)
    report = tmoe.replace_moe(layer, "fp8_block")
    assert_type(report.skipped, dict[str, str])


def choices(layer: tmoe.MoE) -> None:
    with tmoe.options(backend="triton", verify=False), tmoe.autotune(tiles=True):
        assert_type(tmoe.explain(layer, num_tokens=64).chosen, str)
    tmoe.options(verify="no")  # type: ignore[arg-type]
    tmoe.options(backends="triton")  # type: ignore[call-arg]
