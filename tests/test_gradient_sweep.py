"""Gradients of random problems: sizes, dtypes, strides, windows, dropped slots and which tensors
train, all at once, against fp64."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tmoe
from tests.checking import assert_matches
from tests.nn.test_training import SPREAD
from tests.reference import fused_experts_ref
from tmoe.activation import GATED, UNGATED

# Not swiglu_step: its derivative jumps, and two roundings of a number lie on two sides of the jump.
ACTIVATIONS = [*(name for name in GATED if name != "swiglu_step"), *UNGATED]
NAN = float("nan")


def laid_out(tensor: Tensor, choose: random.Random) -> Tensor:
    """The same numbers: transposed, every second of a row that holds NaN between them, or behind
    an odd number of elements."""
    how = choose.choice(["plain", "transposed", "strided", "offset"])
    if how == "transposed":
        return tensor.mT.contiguous().mT
    if how == "strided":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), NAN)
        view = wide[..., 1::2]
    elif how == "offset":
        view = tensor.new_full((tensor.numel() + 5,), NAN)[5:].view(tensor.shape)
    else:
        return tensor
    return view.copy_(tensor)


def problem(seed: int) -> tuple[dict[str, Tensor], dict[str, Any], tmoe.Activation, Tensor]:
    """Leaves of which some train, the other arguments, the activation, and dy."""
    choose, _ = random.Random(seed), torch.manual_seed(seed)
    T, E = choose.choice([1, 3, 17]), choose.choice([1, 3, 7])
    K, local = choose.choice([1, min(2, E), E]), choose.choice([E, max(1, E // 2)])
    H, I = choose.choice([5, 16, 33, 40]), choose.choice([7, 16, 24, 31])
    dtype = choose.choice([torch.float32, torch.float16, torch.bfloat16])
    activation = tmoe.Activation.of(choose.choice(ACTIVATIONS))
    first, rows = choose.choice([0, E - local]), 2 * I if activation.gated else I
    ids = torch.rand(T, E).argsort(-1)[:, :K]
    if choose.random() < 0.2:
        ids = torch.full((T, K), first + choose.randrange(local))  # all tokens to one expert
    if choose.random() < 0.4:
        ids[torch.rand(T, K) < 0.4] = choose.choice([-1, E + 3])
    weights = torch.rand(T, K)
    if choose.random() < 0.3:
        weights[torch.rand(T, K) < 0.5] = 0
    tensors = {
        "x": torch.randn(T, H).to(dtype),
        "gate_up_proj": (torch.randn(local, rows, H) / math.sqrt(H)).to(dtype),
        "down_proj": (torch.randn(local, H, I) / math.sqrt(I)).to(dtype),
        "topk_weights": weights.to(choose.choice([torch.float32, dtype])),
    }
    if choose.random() < 0.5:
        tensors["gate_up_bias"] = torch.randn(local, rows).to(dtype)
    if choose.random() < 0.5:
        tensors["down_bias"] = torch.randn(local, H).to(dtype)
    tensors = {name: laid_out(tensor, choose) for name, tensor in tensors.items()}
    trained = [name for name in tensors if choose.random() < 0.6] or ["x"]
    for name in trained:
        tensors[name].requires_grad_()
    given = {
        "topk_ids": ids.to(choose.choice([torch.int32, torch.int64])),
        "interleaved": activation.gated and choose.random() < 0.3,
        "weight_on_input": choose.random() < 0.3,
        "first_expert": first,
        "num_experts": E,
    }
    dy = torch.randn(choose.choice([1, T]), choose.choice([1, H])).to(dtype).expand(T, H)
    return tensors, given, activation, dy if choose.random() < 0.7 else laid_out(dy.clone(), choose)


def reference(
    leaves: dict[str, Tensor], given: Any, activation: tmoe.Activation, dy: Tensor, dtype: Any
) -> list[Tensor]:
    leaves = {n: t.detach().to(dtype).requires_grad_(t.requires_grad) for n, t in leaves.items()}
    trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
    constants = {"alpha": activation.alpha, "limit": activation.limit}
    given = {name: value for name, value in given.items() if name != "num_experts"}
    y = fused_experts_ref(**leaves, **given, activation=activation.name, **constants, dtype=dtype)
    y = y + sum(0 * leaf.sum() for leaf in trained)  # a gradient for what reaches no expert
    return [y.detach(), *torch.autograd.grad(y, trained, dy.to(dtype))]


@pytest.mark.parametrize("seed", range(30))
def test_a_random_problem(seed, backend):
    leaves, given, activation, dy = problem(seed)
    trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
    with tmoe.options(backend=backend, recompute=seed % 3 == 0):
        y = tmoe.fused_experts(**leaves, **given, activation=activation)
    got = [y.detach()]
    if seed % 2:  # the graph is walked again, and must not have been written over
        got += torch.autograd.grad(y, trained, dy, retain_graph=True)
        for first, second in zip(got[1:], torch.autograd.grad(y, trained, dy), strict=True):
            assert torch.equal(first, second)
    else:
        got += torch.autograd.grad(y, trained, dy)
    truth = reference(leaves, given, activation, dy, torch.float64)
    naive = reference(leaves, given, activation, dy, dy.dtype)
    for mine, true, other, leaf in zip(got, truth, naive, [y, *trained], strict=True):
        assert mine.dtype == leaf.dtype and mine.shape == leaf.shape
        assert_matches(mine, true, other, factor=SPREAD)
