"""Machines and models by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.aot.targets import TARGETS
from tmoe.bench.shapes import SHAPES
from tmoe.dispatch.known import GPUS, MODELS, machine_with, model_layer, problem_of
from tmoe.dispatch.resolve import resolve
from tmoe.formats import SCHEMES


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_is_one_that_kernels_are_compiled_for(gpu):
    compiled = {name[:5] if name.startswith("gfx") else name for name in TARGETS}
    assert machine_with(gpu).architecture in compiled


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_a_backend_on_every_gpu(model, scheme):
    for gpu in GPUS:
        machine = replace(machine_with(gpu), triton_version="3.6.0", flashinfer_version=None)
        problem = problem_of(
            model_layer(model), machine, num_tokens=100, dtype=torch.bfloat16, scheme=scheme
        )
        assert problem.tokens == 128 and resolve(problem).chosen == "triton"


@pytest.mark.parametrize("spelling", ["h200", "H200", "RTX 5090", "rtx-5090"])
def test_spelling(spelling):
    assert machine_with(spelling).name.replace(" ", "").endswith(spelling[-4:].upper())


def test_what_is_not_known_is_refused_with_what_is():
    with pytest.raises(ValueError, match="machine_with: gpu must be one of A100, .*, got 'TPU'"):
        machine_with("TPU")
    with pytest.raises(ValueError, match="model_layer: model must be one of mixtral-8x7b, .*"):
        model_layer("gpt-4")


def test_sizes_are_those_that_the_benchmarks_run():
    for name, layer in MODELS.items():
        if name in SHAPES:
            shape = SHAPES[name]
            wanted = (shape.num_experts, shape.top_k, shape.hidden, shape.intermediate)
            assert (layer.num_experts, layer.top_k, layer.hidden, layer.intermediate) == wanted
