"""What the experts compute: `fused_experts`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activation import Activation
from ..arguments import (
    FLOATS,
    autocast,
    expect_alike,
    expect_coded,
    expect_dtype,
    expect_optional,
    expect_out,
    expect_quantized,
    expect_same_device,
    expect_scheme,
    expect_topk,
    expect_window,
    needs_grad,
)
from ..checks import expect, expect_type
from ..formats import QuantizedTensor
from ..formats.recipe import Recipe
from ..library import operator, with_shortcut
from ..low_rank import LowRank
from ..options import current
from .frozen import run_frozen

_EXPERTS, _EXPERTS_OUT = operator("fused_experts"), operator("fused_experts_out")
_EXPERTS_TRAIN = operator("fused_experts_train")
_QUANTIZED, _QUANTIZED_OUT = operator("quantized_experts"), operator("quantized_experts_out")
_CODED = operator("coded_experts")


@with_shortcut
def fused_experts(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str | Activation = "swiglu",
    scheme: str | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    interleaved: bool = False,
    weight_on_input: bool = False,
    first_expert: int = 0,
    num_experts: int | None = None,
    input_scale: Tensor | None = None,
    hidden_scale: Tensor | None = None,
    gate_up_lora: LowRank | None = None,
    down_lora: LowRank | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Send each token through its K experts: ``y[t] = Σ_k w[t,k] · expert[ids[t,k]](x[t])``.

    Args:
        x: (..., H), float32, float16, bfloat16 or float64. T is the product of the leading sizes.
            Or (T, H), quantised before as the scheme's inputs are, `QuantizedTensor`: then
            input_scale and weight_on_input aren't taken, and the result is that of quantising here.
        gate_up_proj: (E, 2I, H), or (E, I, H) where the activation has no gate; x's dtype, or a
            `QuantizedTensor`.
        down_proj: (E, H, I), x's dtype, or a `QuantizedTensor` of the same format.
        topk_weights: (T, K) or (..., K), any float dtype.
        topk_ids: (T, K) or (..., K), int32 or int64.
        activation: a name or an `Activation`; computed in float32.
        scheme: None or "bf16": weights that aren't quantised, whichever of the dtypes they have.
            For quantised weights a name from `tmoe.formats.SCHEMES`, which says what becomes of the
            inputs of both projections; there is no default. Then x isn't float64, and the weights
            are frozen. Gradients pass the rounding of inputs straight, as if it weren't there.
        gate_up_bias, down_bias: (E, 2I) or (E, I), and (E, H); x's dtype.
        interleaved: the rows of gate_up_proj (and its bias) are g0, u0, g1, u1, ... (gpt-oss)
            instead of all gate rows, then all up rows.
        weight_on_input: the routing weight multiplies an expert's input, not its output (Llama 4).
        first_expert: ids are global; the weights hold experts [first_expert, first_expert + E).
        num_experts: the global count; first_expert + E if left out.
        input_scale, hidden_scale: static scales of the inputs of the two projections, one number or
            (E,), of the schemes fp8_tensor (a scale) and nvfp4 (a global scale); without one it is
            computed from the rows that reach an expert.
        gate_up_lora, down_lora: `tmoe.LowRank` adapters, a pair of matrices for each expert, of any
            float dtype, on weights that are frozen. They multiply what reaches a projection,
            before a scheme rounds it. Not together with `out`.
        out_dtype: None or x's dtype; or float32: a partial sum that other ranks' are added to, not
            rounded before.
        out: x's shape, contiguous, written instead of a new tensor; not while gradients are needed.

    Every tensor may have any strides: a transposed storage is passed as its ``.transpose(1, 2)``.

    Returns:
        x's shape and `out_dtype` (autocast's, while that is on: x, weights, biases are then cast as
        `torch.nn.functional.linear` casts its own). Ids of experts that aren't here, -1 and ids
        past num_experts contribute nothing and never raise, so on one rank of many this is its
        partial sum. The sum over K is taken in float32, in the order of k, and rounded once.

    Differentiable in x, the weights, the biases, topk_weights and the adapters, once.

    Raises:
        TypeError, ValueError: with the argument's name, what was wanted and what came.
        NoBackendError: no backend can run it, or the one that `tmoe.options` asks for can't.
    """
    op = "fused_experts"
    activation = Activation.of(activation, op)
    quantized = isinstance(gate_up_proj, QuantizedTensor) or isinstance(down_proj, QuantizedTensor)
    if quantized:
        expect_dtype(x, op, "x", FLOATS[:3])
        both = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
        expect_quantized(op, scheme, both, input_scale=input_scale, hidden_scale=hidden_scale)
        expect_coded(op, scheme, x, input_scale, weight_on_input, out)
    else:
        expect_scheme(op, scheme)
        for arg, value in (("x", x), ("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
            expect_dtype(value, op, arg, FLOATS)
        for arg, scale in (("input_scale", input_scale), ("hidden_scale", hidden_scale)):
            expect(scale is None, op, arg, "None with weights that aren't quantised", "a scale")
    E, rows, H = _expect_shapes(op, x, gate_up_proj, down_proj, activation)
    _expect_flags(op, activation, interleaved, weight_on_input)
    expect_optional(gate_up_bias, op, "gate_up_bias", (E, rows))
    expect_optional(down_bias, op, "down_bias", (E, H))
    num_experts = expect_window(op, first_expert, num_experts, E)
    topk_weights, topk_ids = expect_topk(op, topk_weights, topk_ids, x, num_experts)

    plain = () if quantized else (gate_up_proj, down_proj)
    x, gate_up_bias, down_bias, *weights = autocast(x, gate_up_bias, down_bias, *plain)
    alike = dict(zip(("gate_up_proj", "down_proj"), weights, strict=False))
    expect_alike(op, {"x": x}, gate_up_bias=gate_up_bias, down_bias=down_bias, **alike)
    expect_same_device(
        op,
        {"x": x},
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        input_scale=input_scale,
        hidden_scale=hidden_scale,
    )
    wide = _expect_out_dtype(op, out_dtype, x, out)
    if gate_up_lora is not None or down_lora is not None:
        expect(
            not isinstance(x, QuantizedTensor), op, "x", "plain where there are adapters", "codes"
        )
        expect(out is None, op, "out", "None with adapters", "a tensor")

    spec = (
        activation.name,
        activation.alpha,
        activation.limit,
        interleaved,
        weight_on_input,
        first_expert,
        num_experts,
        wide,
    )
    return _run(
        x,
        (gate_up_proj, down_proj) if quantized else weights,
        (topk_weights, topk_ids, gate_up_bias, down_bias),
        (gate_up_lora, down_lora),
        (input_scale, hidden_scale),
        scheme,
        spec,
        out,
    )


def _run(
    x: Tensor,
    weights: Any,
    tail: tuple[Any, ...],
    adapters: tuple[LowRank | None, LowRank | None],
    scales: tuple[Tensor | None, Tensor | None],
    scheme: str | None,
    spec: tuple[Any, ...],
    out: Tensor | None,
) -> Tensor:
    """Call the op that fits what `fused_experts` has checked."""
    op, flat = "fused_experts", x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    quantized = isinstance(weights[0], QuantizedTensor)
    parts: Any = [weight.parts() for weight in weights] if quantized else weights
    words = (scheme, *Recipe.held_by(weights[0]).words[:2]) if quantized else ()
    if isinstance(x, QuantizedTensor):
        codes, *scales_of_x = x.parts()
        coded = (codes, scales_of_x, x.dtype, *parts, *tail, *scales, *words, *spec)
        result: Tensor = _CODED(*coded, needs_grad(*tail))
        return result
    arguments = (flat, *parts, *tail, *(scales if quantized else ()), *words, *spec)
    if out is not None:
        inputs = (*parts[0], *parts[1]) if quantized else weights
        expect_out(op, out, x.shape, {"x": x}, *inputs, *tail)
        write = _QUANTIZED_OUT if quantized else _EXPERTS_OUT
        write(out.view(flat.shape), *arguments)
        return out
    needed = needs_grad(x, *tail, *(() if quantized else weights))
    adapted = adapters[0] is not None or adapters[1] is not None
    if adapted or (quantized and needed):
        y = run_frozen(
            op, flat, weights, tail, adapters, scales, scheme, spec, recompute=_recompute()
        )
    elif quantized:
        y = _QUANTIZED(*arguments, False)
    elif needed and not _recompute():
        y = _EXPERTS_TRAIN(*arguments)[0]
    else:
        y = _EXPERTS(*arguments, needed)
    return y if x.ndim == 2 else y.reshape(x.shape)


def _expect_shapes(
    op: str, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, activation: Activation
) -> tuple[int, int, int]:
    """E, the rows of gate_up_proj, and H; raises unless the three tensors agree about them."""
    ok = down_proj.ndim == 3 and min(down_proj.shape) >= 1
    expect(ok, op, "down_proj", "of shape (E, H, I), each at least 1", tuple(down_proj.shape))
    E, H, I = down_proj.shape
    rows = 2 * I if activation.gated else I
    if gate_up_proj.shape != (E, rows, H):
        wanted = f"of shape {(E, rows, H)} for {activation.name} and down_proj of shape {(E, H, I)}"
        expect(False, op, "gate_up_proj", wanted, tuple(gate_up_proj.shape))
    if x.ndim < 1 or x.shape[-1] != H:
        wanted = f"of shape (..., {H}) for down_proj of shape {(E, H, I)}"
        expect(False, op, "x", wanted, tuple(x.shape))
    return E, rows, H


def _expect_flags(op: str, activation: Activation, interleaved: Any, weight_on_input: Any) -> None:
    expect_type(interleaved, bool, op, "interleaved")
    expect_type(weight_on_input, bool, op, "weight_on_input")
    if interleaved and not activation.gated:
        wanted = f"False for {activation.name}, which has no gate"
        expect(False, op, "interleaved", wanted, True)


def _expect_out_dtype(op: str, out_dtype: Any, x: Tensor, out: Tensor | None) -> bool:
    """Whether the result is wider than x; raises for a dtype that it can't have."""
    if out_dtype is not None:
        expect_type(out_dtype, torch.dtype, op, "out_dtype")
    wide = out_dtype is not None and out_dtype != x.dtype
    if wide and (out_dtype != torch.float32 or x.dtype == torch.float64):
        wanted = f"None, x's {x.dtype}, or torch.float32 for 16 bits"
        expect(False, op, "out_dtype", wanted, out_dtype)
    expect(not wide or out is None, op, "out_dtype", "None where out is given", out_dtype)
    return wide


def _recompute() -> bool:
    """As it is in force when torch.compile traces, which can't read it."""
    return current().recompute


# What torch.compiler.assume_constant_result does, without its import of the compiler and of Triton.
_recompute._dynamo_marked_constant = True  # type: ignore[attr-defined]
