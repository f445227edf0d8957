"""Activations: what stands between an expert's two projections, in fp32.

    swiglu       silu(g) · u                        g ≤ limit, |u| ≤ limit first, if there is one
    geglu        gelu(g) · u                        exact (erf); geglu_tanh: the tanh approximation
    swiglu_oai   g · sigmoid(alpha · g) · (u + 1)   g ≤ limit, |u| ≤ limit first (gpt-oss)
    swiglu_step  min(silu(g), limit) · u            |u| ≤ limit (Step-3.7)
    silu, gelu, gelu_tanh, relu2, identity          of g alone: the expert has no up half

g gate, u up. Clamps are selects, so that a NaN stays a NaN, as in torch. None is no limit.
"""

import triton
import triton.language as tl

from tmoe.kernels.activation_ref import activate_ref  # noqa: F401  (in torch; usable without Triton)


@triton.jit
def clamp_above(x, limit):
    if limit is None:
        return x
    else:
        return tl.where(x > limit, limit, x)


@triton.jit
def clamp_both(x, limit):
    if limit is None:
        return x
    else:
        return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x):
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * inner)  # 0.5 · (1 + tanh(z)) = sigmoid(2z)


@triton.jit
def activate_gated(gate, up, alpha, limit, NAME: tl.constexpr):
    """act(gate, up), fp32 in and out, any shape."""
    if NAME == "swiglu":
        gate = clamp_above(gate, limit)
        return gate * tl.sigmoid(gate) * clamp_both(up, limit)
    elif NAME == "swiglu_oai":
        gate = clamp_above(gate, limit)
        return gate * tl.sigmoid(alpha * gate) * (clamp_both(up, limit) + 1.0)
    elif NAME == "swiglu_step":
        return clamp_above(gate * tl.sigmoid(gate), limit) * clamp_both(up, limit)
    elif NAME == "geglu":
        return _gelu(gate) * up
    else:
        tl.static_assert(NAME == "geglu_tanh", "unknown gated activation")
        return _gelu_tanh(gate) * up


@triton.jit
def activate(x, NAME: tl.constexpr):
    """act(x) of an ungated activation, fp32 in and out."""
    if NAME == "silu":
        return x * tl.sigmoid(x)
    elif NAME == "gelu":
        return _gelu(x)
    elif NAME == "gelu_tanh":
        return _gelu_tanh(x)
    elif NAME == "relu2":
        x = tl.where(x < 0.0, 0.0, x)
        return x * x
    else:
        tl.static_assert(NAME == "identity", "unknown activation")
        return x
