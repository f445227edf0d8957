"""The routed experts with quantised weights, in every scheme; quantising the rows counts."""

from __future__ import annotations

import pytest
import torch

import tmoe
from bench.cases import check_quantized_experts, num_inputs, num_touched, with_backend
from bench.roofline import experts_work
from tests.reference import quantized
from tmoe.demo.shapes import random_inputs
from tmoe.formats import SCHEMES

IMPLEMENTATIONS = {name: with_backend(tmoe.fused_experts, name) for name in ("triton", "torch")}
STATIC = 0.01  # a scale of inputs of about unit size, where a checkpoint would bring one


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_layer(measure, weights, shape, tokens, backend, scheme, device, dtype):
    recipe, inputs_recipe = SCHEMES[scheme].weights[0], SCHEMES[scheme].inputs
    layer_weights = [quantized(w, recipe) for w in weights]
    scales = {}
    if SCHEMES[scheme].takes_scales:
        scale = torch.tensor(STATIC, device=device)
        scales = {"input_scale": scale, "hidden_scale": scale}
    inputs = [random_inputs(shape, tokens, device, dtype) for _ in range(num_inputs(tokens))]
    inputs = [(x, topk_weights, ids.int()) for x, topk_weights, ids in inputs]

    def layer(x, topk_weights, topk_ids):
        return IMPLEMENTATIONS[backend](
            x, *layer_weights, topk_weights, topk_ids, scheme=scheme, **scales
        )

    def check(got, x, topk_weights, topk_ids):
        check_quantized_experts(got, x, *layer_weights, topk_weights, topk_ids, scheme, scales)

    touched = num_touched([ids for _, _, ids in inputs])
    moved = sum(w.nbytes for w in layer_weights)
    work = experts_work(shape, tokens, touched, dtype.itemsize, moved)
    fp8 = inputs_recipe is not None and inputs_recipe.format.name.startswith("fp8")
    measure(layer, inputs, check, work, torch.float8_e4m3fn if fp8 else dtype, scheme=scheme)
