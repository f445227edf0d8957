"""What an expert multiplies by: `grouped_gemm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import (
    FLOATS,
    autocast,
    expect_alike,
    expect_dtype,
    expect_optional,
    expect_out,
    expect_quantized,
    expect_same_device,
    expect_scheme,
    needs_grad,
)
from ..checks import expect
from ..formats import QuantizedTensor
from ..formats.recipe import Recipe
from ..library import operator, with_shortcut

_GEMM, _GEMM_OUT = operator("grouped_gemm"), operator("grouped_gemm_out")
_QUANTIZED_GEMM = operator("quantized_grouped_gemm")
_QUANTIZED_GEMM_OUT = operator("quantized_grouped_gemm_out")


@with_shortcut
def grouped_gemm(
    a: Tensor,
    b: Tensor,
    expert_offsets: Tensor,
    *,
    bias: Tensor | None = None,
    scheme: str | None = None,
    a_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each expert's rows by its matrix: ``y[rows e] = a[rows e] @ b[e].T + bias[e]``.

    Args:
        a: (S, D), rows sorted by expert; float32, float16, bfloat16 or float64.
        b: (E, N, D), a's dtype; any strides, a transposed storage as its ``.transpose(1, 2)``. Or
            a `QuantizedTensor`.
        expert_offsets: (E+1,) int32, exclusive: expert e owns rows
            [expert_offsets[e], expert_offsets[e+1]). They start at 0, never decrease and end at S
            or before; on a CPU that is checked, on a GPU it would mean waiting for the device.
        bias: (E, N), a's dtype.
        scheme, a_scale: as `fused_experts` takes `scheme` and `input_scale`.
        out: (S, N) contiguous, written instead of a new tensor; not while gradients are needed.

    Returns:
        (S, N) in a's dtype (autocast's, while that is on). Rows past the last offset are 0 and
        have gradient 0, whatever they hold.

    Differentiable in a, b and bias, once; a quantised b is frozen.

    Raises:
        TypeError, ValueError: with the argument's name, what was wanted and what came.
        NoBackendError: no backend can run it, or the one that `tmoe.options` asks for can't.
    """
    op = "grouped_gemm"
    expect_dtype(a, op, "a", FLOATS)
    quantized = isinstance(b, QuantizedTensor)
    if quantized:
        expect_dtype(a, op, "a", FLOATS[:3])
        expect_quantized(op, scheme, {"b": b}, a_scale=a_scale)
    else:
        expect_scheme(op, scheme)
        expect_dtype(b, op, "b", FLOATS)
        expect(a_scale is None, op, "a_scale", "None where b isn't quantised", "a scale")
    ok = b.ndim == 3 and min(b.shape) >= 1
    expect(ok, op, "b", "of shape (E, N, D), each at least 1", tuple(b.shape))
    E, N, D = b.shape
    ok = a.ndim == 2 and a.shape[1] == D
    expect(ok, op, "a", f"of shape (S, {D}) for b of shape {(E, N, D)}", tuple(a.shape))
    expect_dtype(expert_offsets, op, "expert_offsets", (torch.int32,))
    ok = expert_offsets.shape == (E + 1,)
    wanted = f"of shape ({E + 1},) for {E} experts"
    expect(ok, op, "expert_offsets", wanted, tuple(expert_offsets.shape))
    expect_optional(bias, op, "bias", (E, N))

    a, bias, *plain = autocast(a, bias, *(() if quantized else (b,)))
    expect_alike(op, {"a": a}, bias=bias, **dict(zip(["b"], plain, strict=False)))
    expect_same_device(op, {"a": a}, b=b, expert_offsets=expert_offsets, a_scale=a_scale)
    arguments: tuple[Any, ...]
    if isinstance(b, QuantizedTensor):
        plain, words = b.parts(), Recipe.held_by(b).words
        arguments = (a, plain, expert_offsets, bias, a_scale, scheme, *words[:2])
        run, run_out = _QUANTIZED_GEMM, _QUANTIZED_GEMM_OUT
    else:
        arguments = (a, *plain, expert_offsets, bias)
        run, run_out = _GEMM, _GEMM_OUT
    if out is None:
        y: Tensor = run(*arguments, needs_grad(a, bias, *plain))
        return y
    expect_out(op, out, (a.shape[0], N), {"a": a}, *plain, expert_offsets, bias)
    run_out(out, *arguments)
    return out
