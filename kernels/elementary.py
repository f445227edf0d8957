"""exp, log1p, tanh and what is made of them, rounded as torch's own kernels round them on a GPU.

Routing compares scores, so that a last bit may decide who is selected. `tl.exp` is an approximation
there. Triton's interpreter has none of libdevice and takes a detour through fp64.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from tmoe.kernels.casts import INTERPRETED


@triton.jit
def exp(x):
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def log1p(x):
    """For x >= 0."""
    if INTERPRETED:
        u = 1.0 + x.to(tl.float64)
        lost = u == 1.0
        quotient = tl.log(u) / tl.where(lost, 1.0, u - 1.0)  # log(u) / (u - 1) varies slowly
        return tl.where(lost, x, (x * quotient).to(tl.float32))
    else:
        return libdevice.log1p(x)


@triton.jit
def tanh(x):
    if INTERPRETED:
        e = tl.exp(-2.0 * tl.abs(x.to(tl.float64)))
        t = (1.0 - e) / (1.0 + e)
        return tl.where(x < 0.0, -t, t).to(tl.float32)
    else:
        return libdevice.tanh(x)


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)); x itself above 20, where torch leaves it at that."""
    return tl.where(x > 20.0, x, log1p(exp(x)))
