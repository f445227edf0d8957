"""How the suite decides that a result is right.

The truth is computed in fp64 (or fp32); the bound is twice the error that torch itself makes doing
the same maths in the dtype under test, so no tolerance is picked by hand.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assert_matches(got: Tensor, truth: Tensor, naive: Tensor, *, factor: float = 2.0) -> None:
    """`got` must be within `factor` times the error of `naive` (torch, same dtype) against `truth`.

    Both the largest and the root-mean-square error are bounded. Torch's error may be small by luck,
    so each bound has a floor at the truth's own scale: one rounding to the dtype and three in fp32
    (after either projection and in the sum over experts).
    """
    assert got.shape == truth.shape, f"shape {tuple(got.shape)}, wanted {tuple(truth.shape)}"
    if got.numel() == 0:
        return
    got64, truth64, naive64 = got.double(), truth.double(), naive.double()
    assert torch.isfinite(got64).all() or not torch.isfinite(truth64).all(), "not finite"
    step = torch.finfo(got.dtype).eps + 3 * torch.finfo(torch.float32).eps
    for what, norm in (
        ("largest", lambda x: x.abs().max()),
        ("rms", lambda x: x.square().mean().sqrt()),
    ):
        error, allowed = (
            norm(got64 - truth64),
            factor * norm(naive64 - truth64) + step * norm(truth64),
        )
        assert error <= allowed, f"{what} error {error:.3e}, allowed {allowed:.3e}"
