"""Derivatives of the activations of `activation.py`, in fp32.

    y = act(gate, up)        d_gate = d_y · ∂act/∂gate        d_up = d_y · ∂act/∂up

Behind a clamp that cut its argument off, the gradient is 0; on the limit itself it passes, as in
`activation_ref.py`. The activated value comes along, since both need the same sigmoid or erf.
"""

import triton
import triton.language as tl

from tmoe.kernels.activation import clamp_above, clamp_both


@triton.jit
def _not_above(x, limit, gradient):
    """`gradient` of a number that `clamp_above` left as it was."""
    if limit is None:
        return gradient
    else:
        return tl.where(x > limit, 0.0, gradient)


@triton.jit
def _within(x, limit, gradient):
    """`gradient` of a number that `clamp_both` left as it was."""
    if limit is None:
        return gradient
    else:
        return tl.where((x > limit) | (x < -limit), 0.0, gradient)


@triton.jit
def _silu(x):
    """(silu(x), its derivative)"""
    s = tl.sigmoid(x)
    y = x * s
    return y, s + y * (1.0 - s)


@triton.jit
def _gelu(x):
    """(gelu(x), its derivative)"""
    below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # the normal distribution's share
    density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * below, below + x * density


@triton.jit
def _gelu_tanh(x):
    """(gelu_tanh(x), its derivative)"""
    s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return x * s, s + x * s * (1.0 - s) * slope


@triton.jit
def activate_gated_gradient(gate, up, d_y, alpha, limit, NAME: tl.constexpr):
    """(y, d_gate, d_up), all fp32 and of one shape."""
    if NAME == "swiglu":
        y_gate, slope = _silu(clamp_above(gate, limit))
        u = clamp_both(up, limit)
        return (
            y_gate * u,
            _not_above(gate, limit, d_y * u * slope),
            _within(up, limit, d_y * y_gate),
        )
    elif NAME == "swiglu_oai":
        g = clamp_above(gate, limit)
        s = tl.sigmoid(alpha * g)
        y_gate = g * s
        u = clamp_both(up, limit) + 1.0
        slope = s + alpha * y_gate * (1.0 - s)
        return (
            y_gate * u,
            _not_above(gate, limit, d_y * u * slope),
            _within(up, limit, d_y * y_gate),
        )
    elif NAME == "swiglu_step":
        silu, slope = _silu(gate)
        y_gate = clamp_above(silu, limit)
        u = clamp_both(up, limit)
        return (
            y_gate * u,
            _not_above(silu, limit, d_y * u * slope),
            _within(up, limit, d_y * y_gate),
        )
    elif NAME == "geglu":
        y_gate, slope = _gelu(gate)
        return y_gate * up, d_y * up * slope, d_y * y_gate
    else:
        tl.static_assert(NAME == "geglu_tanh", "unknown gated activation")
        y_gate, slope = _gelu_tanh(gate)
        return y_gate * up, d_y * up * slope, d_y * y_gate


@triton.jit
def activate_gradient(x, d_y, NAME: tl.constexpr):
    """(y, d_x) of an ungated activation, fp32."""
    if NAME == "silu":
        y, slope = _silu(x)
        return y, d_y * slope
    elif NAME == "gelu":
        y, slope = _gelu(x)
        return y, d_y * slope
    elif NAME == "gelu_tanh":
        y, slope = _gelu_tanh(x)
        return y, d_y * slope
    elif NAME == "relu2":
        x = tl.where(x < 0.0, 0.0, x)
        return x * x, d_y * 2.0 * x
    else:
        tl.static_assert(NAME == "identity", "unknown activation")
        return x, d_y
