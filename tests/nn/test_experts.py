"""Experts: parameter names, shapes and what the constructor refuses."""

import pytest
import torch
from torch.nn.utils import parametrize

import tmoe
from tmoe.nn import Experts

E, H, I = 4, 16, 24

GATED = ["swiglu", "geglu", "geglu_tanh", "swiglu_oai", tmoe.Activation.swiglu_step(7.0)]
UNGATED = ["silu", "gelu", "gelu_tanh", "relu2", "identity"]


def inputs(T=5, K=2):
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    return torch.randn(T, H), ids, torch.rand(T, K)


def shapes(module):
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


@pytest.mark.parametrize("activation", GATED, ids=str)
def test_gated_experts_have_2i_rows(activation):  # WL04
    assert shapes(Experts(E, H, I, activation=activation, bias=True)) == {
        "gate_up_proj": (E, 2 * I, H),
        "down_proj": (E, H, I),
        "gate_up_proj_bias": (E, 2 * I),
        "down_proj_bias": (E, H),
    }


@pytest.mark.parametrize("activation", UNGATED)
def test_ungated_experts_have_i_rows(activation):  # WL04
    assert shapes(Experts(E, H, I, activation=activation, bias=True)) == {
        "up_proj": (E, I, H),
        "down_proj": (E, H, I),
        "up_proj_bias": (E, I),
        "down_proj_bias": (E, H),
    }


def test_weights_of_the_other_kind_are_refused_with_both_sizes():  # WL04
    state = Experts(E, H, I).state_dict()
    state["gate_up_proj"] = state["gate_up_proj"][:, :I]
    with pytest.raises(RuntimeError, match=r"gate_up_proj.*\[4, 24, 16\].*\[4, 48, 16\]"):
        Experts(E, H, I).load_state_dict(state)


def test_rows_of_ids_outside_are_zero():
    experts = Experts(E, H, I, bias=True)
    x, ids, weights = inputs()
    ids[0] = torch.tensor([-1, E])
    weights[0] = float("nan")
    assert torch.equal(experts(x, ids, weights)[0], torch.zeros(H))


def test_interleaved_is_the_same_weights_in_another_order():
    plain = Experts(E, H, I, activation="swiglu_oai", bias=True)
    woven = Experts(E, H, I, activation="swiglu_oai", bias=True, interleaved=True)
    state = plain.state_dict()
    order = torch.arange(2 * I).view(2, I).T.reshape(-1)  # g0, u0, g1, u1, ...
    for name in ("gate_up_proj", "gate_up_proj_bias"):
        state[name] = state[name][:, order]
    woven.load_state_dict(state)
    args = inputs()
    torch.testing.assert_close(woven(*args), plain(*args))


def test_each_parameter_is_read_once():
    reads = []

    class Counted(torch.nn.Module):
        def forward(self, weight):
            reads.append(tuple(weight.shape))
            return weight

    experts = Experts(E, H, I, bias=True)
    names = shapes(experts)
    for name in names:
        parametrize.register_parametrization(experts, name, Counted())
    reads.clear()
    experts(*inputs())
    assert sorted(reads) == sorted(names.values())


def test_bad_arguments():
    with pytest.raises(ValueError, match="Experts: num_experts must be at least 1, got 0"):
        Experts(0, H, I)
    with pytest.raises(ValueError, match="Experts: intermediate_size must be at least 1, got -3"):
        Experts(E, H, -3)
    with pytest.raises(TypeError, match="Experts: hidden_size must be an int, got float"):
        Experts(E, 16.0, I)
    with pytest.raises(
        ValueError, match="Experts: scheme must be None, bf16 or one of .*, got fp9"
    ):
        Experts(E, H, I, scheme="fp9")
    with pytest.raises(ValueError, match="interleaved must be False for relu2"):
        Experts(E, H, I, activation="relu2", interleaved=True)
    with pytest.raises(
        ValueError, match="Experts: dtype must be one of float32.*got float8_e4m3fn"
    ):
        Experts(E, H, I, dtype=torch.float8_e4m3fn)
