"""Every activation against formulas written a second time, and on numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.checking import assert_matches
from tests.reference import activation_ref
from tmoe.activation import GATED, UNGATED, Activation
from tmoe.kernels.activation import activate, activate_gated, activate_ref

BLOCK = 256
ACTIVATIONS = [
    *(Activation.of(name) for name in GATED if name != "swiglu_step"),
    Activation.swiglu_step(limit=0.7),
    Activation.swiglu(limit=1.5),
    Activation.swiglu_oai(alpha=0.5, limit=math.inf),
    *(Activation.of(name) for name in UNGATED),
]
SPECIAL = [math.inf, 0.0, -0.0, 1e-40, 1e-20, 30.0, -30.0, 100.0, -100.0, 1e20, -1e20, 3e38, -3e38]


@triton.jit
def _activate_kernel(
    out_ptr, gate_ptr, up_ptr, num, alpha, limit,
    NAME: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + offs, mask=offs < num, other=0.0)
    if GATED:
        up = tl.load(up_ptr + offs, mask=offs < num, other=0.0)
        y = activate_gated(gate, up, alpha, limit, NAME)
    else:
        y = activate(gate, NAME)
    tl.store(out_ptr + offs, y, mask=offs < num)


def run(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    _activate_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
        out, gate, up, gate.numel(), activation.alpha, activation.limit,
        NAME=activation.name, GATED=activation.gated, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def constants(activation: Activation) -> dict:
    return {"alpha": activation.alpha, "limit": activation.limit}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_against_the_formulas(activation, device):
    """WL05, WL06: gates and ups on both sides of every limit."""
    gate, up = 4 * torch.randn(2, 1000, device=device)
    halves = (gate, up) if activation.gated else (gate, None)
    wide = [half if half is None else half.double() for half in halves]
    truth = activation_ref(*wide, activation.name, activation.alpha, activation.limit)
    naive = activate_ref(*halves, name=activation.name, **constants(activation))
    assert_matches(run(activation, gate, up), truth, naive)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_where_numbers_end(activation, device):
    """Infinite, large, tiny and signed zeros. (torch's own gelu of inf is NaN on a CPU.)"""
    gate, up = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor([0.5, -2.0, 1e20])).T
    gate, up = gate.contiguous().to(device), up.contiguous().to(device)
    halves = (gate.double(), up.double() if activation.gated else None)
    want = activation_ref(*halves, activation.name, activation.alpha, activation.limit).float()
    torch.testing.assert_close(run(activation, gate, up), want, rtol=1e-5, atol=1e-11)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_nan_stays_a_nan(activation, device):
    """No clamp may hide it."""
    gate = torch.tensor([math.nan, 1.0, math.nan], device=device)
    up = torch.tensor([1.0, math.nan, math.nan], device=device)
    got = run(activation, gate, up).isnan().tolist()
    assert got == ([True, True, True] if activation.gated else [True, False, True])
