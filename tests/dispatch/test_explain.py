"""`tmoe.explain` for layers and for problems."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tmoe
from tmoe.dispatch.problem import Machine, Problem


@pytest.fixture
def layer():
    return tmoe.MoE(32, 16, tmoe.Routing(6, 2, "Renormalize"), bias=True, activation="swiglu_oai")


def test_a_layer_is_described_by_its_weights(layer):
    with torch.no_grad():
        decision = tmoe.explain(layer, num_tokens=5)
    p = decision.problem
    assert (p.op, p.tokens, p.hidden, p.intermediate, p.num_experts, p.top_k) == (
        "fused_experts", 8, 32, 16, 6, 2,
    )  # fmt: skip
    assert p.activation == tmoe.Activation.swiglu_oai() and p.has_bias and not p.needs_grad
    assert decision.chosen == "torch"


def test_it_prints_as_a_table(layer):
    with torch.no_grad():
        first, *rows = str(tmoe.explain(layer, num_tokens=5)).splitlines()
    assert first == (
        "fused_experts(T<=8, H=32, I=16, E=6, K=2, float32, swiglu_oai, has bias) on cpu: torch"
    )
    assert [row.split()[:2] for row in rows] == [
        ["->", "torch"], ["triton", "yes"],
        ["flashinfer_trtllm", "no"], ["flashinfer_cutlass", "no"], ["flashinfer", "no"],
    ]  # fmt: skip
    assert repr(tmoe.explain(layer)) == str(tmoe.explain(layer))


def test_it_says_that_gradients_need_the_torch_backend(layer):
    decision = tmoe.explain(layer)
    assert decision.problem.needs_grad and decision.chosen == "torch"
    assert "backward" in str(decision)
    assert not tmoe.explain(layer.requires_grad_(False)).problem.needs_grad


def test_the_options_in_force_count(layer):
    layer.requires_grad_(False)
    with tmoe.options(backend="triton"):
        assert tmoe.explain(layer).chosen == "triton"
    with tmoe.options(batch_invariant=True):
        assert tmoe.explain(layer).problem.batch_invariant
        with tmoe.options(backend="torch"), pytest.raises(tmoe.NoBackendError, match="batch inv"):
            tmoe.explain(layer)


def test_bare_experts_and_another_machine(layer):
    assert tmoe.explain(layer.experts).problem.top_k == 1
    h200 = Machine("cuda", "NVIDIA H200", (9, 0), triton_version="3.6.0")
    problem = Problem("fused_experts", 100, 2048, 768, 128, 8, torch.bfloat16, h200)
    decision = tmoe.explain(problem)
    assert decision.problem.tokens == 128
    assert decision.chosen == "triton" and "on NVIDIA H200" in str(decision)


def test_an_experts_module_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        hidden_size=32, intermediate_size=16, num_local_experts=6, num_experts_per_tok=2,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        vocab_size=8,
    )  # fmt: skip
    block = transformers.GptOssForCausalLM(config).model.layers[0].mlp
    for module in (block, block.experts):
        p = tmoe.explain(module).problem
        assert (p.hidden, p.intermediate, p.num_experts, p.top_k) == (32, 16, 6, 2)
        assert p.has_bias


def test_what_is_not_a_layer_is_refused():
    with pytest.raises(TypeError, match="explain: layer_or_problem must be a Module or Problem"):
        tmoe.explain("layer")
    with pytest.raises(ValueError, match="a module with stacked expert weights .* got Linear"):
        tmoe.explain(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="num_tokens must be at least 0, got -1"):
        tmoe.explain(nn.Linear(2, 2), num_tokens=-1)
