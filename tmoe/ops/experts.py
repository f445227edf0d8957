"""What the experts compute: `grouped_gemm`, `fused_experts`, and `moe` from logits to output."""

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
from ..library import with_shortcut  # (it defines torch.ops.tmoe, too)
from ..low_rank import LowRank
from ..options import current
from ..routing import Routing
from .frozen import run_frozen
from .route import route


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
        run = torch.ops.tmoe.quantized_grouped_gemm
        run_out = torch.ops.tmoe.quantized_grouped_gemm_out
    else:
        arguments = (a, *plain, expert_offsets, bias)
        run, run_out = torch.ops.tmoe.grouped_gemm, torch.ops.tmoe.grouped_gemm_out
    if out is None:
        y: Tensor = run.default(*arguments, needs_grad(a, bias, *plain))
        return y
    expect_out(op, out, (a.shape[0], N), {"a": a}, *plain, expert_offsets, bias)
    run_out.default(out, *arguments)
    return out


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
    activation = Activation.of(activation)
    if isinstance(gate_up_proj, QuantizedTensor) or isinstance(down_proj, QuantizedTensor):
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
    expect_type(interleaved, bool, op, "interleaved")
    expect_type(weight_on_input, bool, op, "weight_on_input")
    if interleaved and not activation.gated:
        wanted = f"False for {activation.name}, which has no gate"
        expect(False, op, "interleaved", wanted, True)
    expect_optional(gate_up_bias, op, "gate_up_bias", (E, rows))
    expect_optional(down_bias, op, "down_bias", (E, H))
    num_experts = expect_window(op, first_expert, num_experts, E)
    topk_weights, topk_ids = expect_topk(op, topk_weights, topk_ids, x, num_experts)

    quantized = isinstance(gate_up_proj, QuantizedTensor)
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
    wide = out_dtype is not None and out_dtype != x.dtype
    if wide and (out_dtype != torch.float32 or x.dtype == torch.float64):
        wanted = f"None, x's {x.dtype}, or torch.float32 for 16 bits"
        expect(False, op, "out_dtype", wanted, out_dtype)
    rows_of_x = x if x.ndim == 2 else x.reshape(-1, H)
    tail = (topk_weights, topk_ids, gate_up_bias, down_bias)
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
    adapted = gate_up_lora is not None or down_lora is not None
    coded_input = isinstance(x, QuantizedTensor)
    fits = not (adapted and coded_input)
    expect(fits, op, "x", "plain where there are adapters", "codes")
    if adapted or (quantized and not coded_input and out is None and needs_grad(x, *tail)):
        expect(out is None, op, "out", "None with adapters", "a tensor")
        both_weights = (gate_up_proj, down_proj) if quantized else tuple(weights)
        y = run_frozen(
            op, rows_of_x, both_weights, tail, (gate_up_lora, down_lora),
            (input_scale, hidden_scale), scheme, spec, recompute=_recompute(),
        )  # fmt: skip
        return y if x.ndim == 2 else y.reshape(x.shape)
    if quantized:
        assert isinstance(gate_up_proj, QuantizedTensor) and isinstance(down_proj, QuantizedTensor)
        words = Recipe.held_by(gate_up_proj).words
        if isinstance(x, QuantizedTensor):
            codes, *scales = x.parts()
            coded = (codes, scales, x.dtype, gate_up_proj.parts(), down_proj.parts(), *tail)
            more = (input_scale, hidden_scale, scheme, *words[:2], *spec)
            result: Tensor = torch.ops.tmoe.coded_experts.default(*coded, *more, needs_grad(*tail))
            return result
        parts = (gate_up_proj.parts(), down_proj.parts())
        arguments = (
            rows_of_x, *parts, *tail, input_scale, hidden_scale, scheme, *words[:2], *spec
        )  # fmt: skip
        run = torch.ops.tmoe.quantized_experts
        run_out = torch.ops.tmoe.quantized_experts_out
        needed = False
    else:
        arguments = (rows_of_x, *weights, *tail, *spec)
        run, run_out = torch.ops.tmoe.fused_experts, torch.ops.tmoe.fused_experts_out
        needed = needs_grad(x, *weights, *tail)
    if out is None:
        if needed and not quantized and not _recompute():
            y = torch.ops.tmoe.fused_experts_train.default(*arguments)[0]
        else:
            y = run.default(*arguments, needed)
        return y if x.ndim == 2 else y.reshape(x.shape)
    expect(not wide, op, "out_dtype", "None where out is given", out_dtype)
    inputs = (*parts[0], *parts[1]) if quantized else weights
    expect_out(op, out, x.shape, {"x": x}, *inputs, *tail)
    run_out.default(out.view(-1, H), *arguments)
    return out


def _recompute() -> bool:
    """As it is in force when torch.compile traces, which can't read it."""
    return current().recompute


# What torch.compiler.assume_constant_result does, without its import of the compiler and of Triton.
_recompute._dynamo_marked_constant = True  # type: ignore[attr-defined]


def moe(
    x: Tensor,
    logits: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    num_experts: int | None = None,
    weight_on_input: bool = False,
    **experts: Any,
) -> Tensor:
    """`route`, then `fused_experts`: from the router's logits (..., E) to the layer's output.

    `bias` and `expert_scale` are `route`'s; every other keyword is `fused_experts`', and so is what
    is returned and raised. The routing has the global number of experts and says, with
    `weight_on_input` (which Llama4 implies), where the routing weight is applied. Shared experts
    that the router weighs are the last of the weights.
    """
    expect_type(routing, Routing, "moe", "routing")
    expect_type(weight_on_input, bool, "moe", "weight_on_input")
    E = routing.num_logits
    expect(num_experts in (None, E), "moe", "num_experts", f"{E}, as in routing", num_experts)
    topk_weights, topk_ids = route(logits, routing, bias=bias, expert_scale=expert_scale)
    return fused_experts(
        x,
        gate_up_proj,
        down_proj,
        topk_weights,
        topk_ids,
        num_experts=E,
        weight_on_input=weight_on_input or routing.weight_on_input,
        **experts,
    )
