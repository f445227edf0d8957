"""Activation backward: every activation's derivative against autograd, and what is written over."""

from __future__ import annotations

import pytest
import torch

from tests.checking import assert_matches
from tmoe.activation import GATED, UNGATED, Activation
from tmoe.kernels.activation_backward import activation_backward, activation_backward_ref
from tmoe.kernels.activation_ref import clamp_above_ref, clamp_both_ref
from tmoe.kernels.permute import permute_ref
from tmoe.kernels.sort import sort_tokens

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")
ACTIVATIONS = {
    **{name: Activation.of(name) for name in GATED + UNGATED if name != "swiglu_step"},
    "swiglu, clamped": Activation.swiglu(0.5),
    "swiglu_oai, clamped": Activation.swiglu_oai(limit=0.5),
    "swiglu_step, clamped": Activation.swiglu_step(0.2),
}


class Rows:
    """The kernel's inputs; rows of no expert are NaN, and a quarter of the slots have no row."""

    def __init__(self, activation, dtype, device, *, I=40, H=24, T=9, K=3, interleaved=False):
        ids = torch.randint(4, (T, K), device=device).int()
        ids[torch.rand(T, K, device=device) < 0.25] = -1
        self.order = sort_tokens(ids, num_experts=4, block_m=16)
        self.rows = int(self.order.expert_offsets[-1])
        self.slots = self.order.row_to_slot[: self.rows].long()
        columns = 2 * I if activation.gated else I
        self.hidden, self.grad = (
            torch.randn(T * K, n, device=device).to(dtype) for n in (columns, I)
        )
        self.hidden[self.rows :] = self.grad[self.rows :] = NAN
        self.weights = torch.rand(T * K, device=device)
        self.dy = torch.randn(T, H, device=device).to(dtype)
        self.bias = torch.randn(4, H, device=device).to(dtype)
        self.how = {
            "activation": activation.name, "gated": activation.gated, "interleaved": interleaved,
            "alpha": activation.alpha, "limit": activation.limit,
        }  # fmt: skip

    def results(self):
        return {
            "d_hidden": torch.full_like(self.hidden, 7.0),
            "activated": torch.full_like(self.grad, 7.0),
            "d_weight": torch.full_like(self.weights, 7.0),
        }

    def reference(self, dtype, *, weights, bias):
        """By name, of the rows that exist."""
        hidden, grad = self.hidden[: self.rows].to(dtype), self.grad[: self.rows].to(dtype)
        row_weight = None if weights is None else weights[self.slots, None].to(dtype)
        d_hidden, activated, dots = activation_backward_ref(
            hidden, grad, row_weight=row_weight, **self.how
        )
        if bias is not None:
            offsets = self.order.expert_offsets.long()
            biases = bias.to(dtype).repeat_interleave(offsets.diff(), 0)
            dots = dots + (permute_ref(self.dy.to(dtype), self.slots, 3) * biases).sum(1)
        return {"d_hidden": d_hidden, "activated": activated, "d_weight": dots}

    def check(self, got, *, weights=None, bias=None):
        truth = self.reference(torch.float64, weights=weights, bias=bias)
        naive = self.reference(torch.float32, weights=weights, bias=bias)
        for name, values in got.items():
            written = values[self.slots] if name == "d_weight" else values[: self.rows]
            assert_matches(written, truth[name], naive[name].to(self.hidden.dtype))
            left = torch.ones(len(values), dtype=torch.bool, device=values.device)
            left[self.slots if name == "d_weight" else slice(self.rows)] = False
            assert (values[left] == 7).all(), f"{name}: wrote a row of no expert"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name, dtype, device):
    rows = Rows(ACTIVATIONS[name], dtype, device)
    got = rows.results()
    activation_backward(rows.hidden, rows.grad, rows.order, **got, **rows.how)
    rows.check(got)


@pytest.mark.parametrize("name", ["swiglu", "swiglu_oai", "relu2"])
def test_weights_and_bias(name, device):
    activation = ACTIVATIONS[name]
    rows = Rows(activation, torch.bfloat16, device, I=33, H=40, interleaved=activation.gated)
    got = rows.results()
    activation_backward(
        rows.hidden, rows.grad, rows.order, **got, row_weight=rows.weights, dy=rows.dy,
        bias=rows.bias, **rows.how,
    )  # fmt: skip
    rows.check(got, weights=rows.weights, bias=rows.bias)


@pytest.mark.parametrize("wanted", ["d_hidden", "activated", "d_weight"])
def test_each_result_alone(wanted, device):
    rows = Rows(ACTIVATIONS["swiglu"], torch.float32, device)
    got = {wanted: rows.results()[wanted]}
    grad = None if wanted == "activated" else rows.grad
    activation_backward(rows.hidden, grad, rows.order, **got, **rows.how)
    rows.check(got)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("I", [24, 300])
def test_results_over_the_inputs(I, interleaved, device):
    """d_hidden in hidden's memory and `activated` in grad's, beyond one block of columns too."""
    rows = Rows(ACTIVATIONS["swiglu"], torch.bfloat16, device, I=I, interleaved=interleaved)
    want = rows.results()
    activation_backward(rows.hidden, rows.grad, rows.order, **want, **rows.how)
    rows.check(want)
    activation_backward(
        rows.hidden, rows.grad, rows.order, d_hidden=rows.hidden, activated=rows.grad, **rows.how
    )
    assert torch.equal(rows.hidden[: rows.rows], want["d_hidden"][: rows.rows])
    assert torch.equal(rows.grad[: rows.rows], want["activated"][: rows.rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamps_are_those_of_torch(dtype, device):
    """In their values everywhere, and in their gradients but on the limit: there torch's own passes
    up to 2.13, and is 0 from 2.14 on."""
    inf = float("inf")
    x = torch.tensor([-inf, -7.5, -7.0, -0.0, 0.0, 6.5, 7.0, 7.5, inf], device=device).to(dtype)
    for ours, clamp in (
        (clamp_above_ref, lambda x, limit: x.clamp(max=limit)),
        (clamp_both_ref, lambda x, limit: x.clamp(-limit, limit)),
    ):
        got, want = (x.clone().requires_grad_() for _ in range(2))
        y = ours(got, 7.0)
        torch.testing.assert_close(y, clamp(want, 7.0), rtol=0, atol=0)
        y.sum().backward()
        clamp(want, 7.0).sum().backward()
        off_limit = x.abs() != 7
        assert torch.equal(got.grad[off_limit], want.grad[off_limit])
        assert (got.grad[~off_limit] == 1).all()
        assert ours(x * NAN, 7.0).isnan().all()


def test_on_the_limit_the_gradient_passes(device):
    """Whatever torch's clamp does there; beyond, it is exactly 0."""
    rows = Rows(Activation.swiglu(1.0), torch.float32, device, I=16)
    rows.hidden[:, :16], rows.hidden[:, 16:] = 1.0, -1.0
    got = rows.results()
    activation_backward(rows.hidden, rows.grad, rows.order, **got, **rows.how)
    rows.check(got)
    assert got["d_hidden"][: rows.rows].abs().min() > 0
    rows.hidden *= 1.5
    activation_backward(rows.hidden, rows.grad, rows.order, **got, **rows.how)
    assert not got["d_hidden"][: rows.rows].any()
