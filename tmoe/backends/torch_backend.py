"""The experts in plain torch: on every device, differentiable, and where gradients come from.

Rows are gathered by expert, multiplied expert by expert, put back and summed, each a visible step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tmoe.kernels.route_ref import count_ref, route_ref, softmax_ref

from ..dispatch.backend import NO_SCALES
from ..dispatch.problem import (
    ExpertsSpec,
    Problem,
    Routed,
    RouteInputs,
    StaticScales,
    result_dtype,
)
from ..formats import QuantizedTensor
from ..formats.compute import quantize_parts
from ..formats.recipe import Recipe
from ..formats.scheme import SCHEMES
from ..routing import Routing
from .torch_quantized import project, rounded


class TorchBackend:
    """See `tmoe.dispatch.backend.Backend` for what the methods take and return."""

    name = "torch"

    def why_not(self, problem: Problem) -> str | None:
        if problem.batch_invariant and problem.op not in ("route", "quantize"):
            return "not batch invariant: torch's matmul picks its kernel by the number of rows"
        if problem.scheme is not None and problem.op != "quantize" and problem.needs_grad:
            return f"{problem.scheme} weights have no backward, and gradients are needed"
        return None

    def route(self, logits: Tensor, routing: Routing, inputs: RouteInputs) -> Routed:
        bias, expert_scale, topk_ids, want_probs, want_counts, *_ = inputs
        weights, ids = route_ref(
            logits,
            bias=bias,
            expert_scale=expert_scale,
            topk_ids=topk_ids,
            **routing.kernel_arguments,
        )
        E = routing.num_experts
        probs = softmax_ref(logits[:, :E]) if want_probs else None
        return Routed(weights, ids, probs, count_ref(ids, E) if want_counts else None)

    def router(
        self, x: Tensor, weight: Tensor, linear_bias: Tensor | None, routing: Routing,
        inputs: RouteInputs,
    ) -> tuple[Tensor, Routed]:  # fmt: skip
        logits = F.linear(x.to(weight.dtype), weight, linear_bias)
        return logits, self.route(logits, routing, inputs)

    def quantize(
        self, x: Tensor, recipe: Recipe, scale: Tensor | None, global_scale: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return quantize_parts(x, recipe, scale, global_scale, "torch")

    def grouped_gemm(
        self,
        a: Tensor,
        b: Tensor,
        expert_offsets: Tensor,
        bias: Tensor | None,
        out: Tensor | None = None,
        scheme: str | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        if isinstance(b, QuantizedTensor):
            inputs = SCHEMES[scheme].inputs if scheme else None
            rows = _clear_tail(a.float(), expert_offsets)
            rows = rounded(rows, inputs, scale, expert_offsets)
            y = project(rows, b, bias, expert_offsets).to(a.dtype)
        else:
            y = _GroupedMatmul.apply(a, b, bias, expert_offsets).to(a.dtype)
        return y if out is None else out.copy_(y)

    def fused_experts(
        self,
        x: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        spec: ExpertsSpec,
        out: Tensor | None = None,
        scales: StaticScales = NO_SCALES,
    ) -> Tensor:
        (T, K), H = topk_ids.shape, x.shape[1]
        wide = torch.promote_types(x.dtype, torch.float32)
        order = _sort(topk_ids, spec.first_expert, gate_up_proj.shape[0])
        # Selects, not products with zero: what stands in a dropped slot may be NaN.
        weights = topk_weights.to(wide).masked_fill(~order.local, 0.0).unsqueeze(-1)  # (T, K, 1)

        # One row per slot before the gather, so that its backward sums over K in one fixed order.
        slots = x.unsqueeze(1).expand(T, K, H)
        if spec.weight_on_input:
            slots = slots * weights
            slots = slots if spec.scheme else slots.to(x.dtype)
        rows = slots.reshape(T * K, H).index_select(0, order.row_to_slot)
        offsets = order.expert_offsets
        if isinstance(gate_up_proj, QuantizedTensor) and isinstance(down_proj, QuantizedTensor):
            inputs = SCHEMES[spec.scheme].inputs if spec.scheme else None
            rows = rounded(_clear_tail(rows.float(), offsets), inputs, scales.input, offsets)
            rows = _activate(project(rows, gate_up_proj, gate_up_bias, offsets), spec)
            rows = rounded(_clear_tail(rows, offsets), inputs, scales.hidden, offsets)
            rows = project(rows, down_proj, down_bias, offsets)
        else:
            rows = _GroupedMatmul.apply(rows, gate_up_proj, gate_up_bias, offsets)
            rows = _activate(rows.to(wide), spec).to(x.dtype)
            rows = _GroupedMatmul.apply(rows, down_proj, down_bias, offsets)

        slots = rows.index_select(0, order.slot_to_row).view(T, K, H)
        slots = slots.masked_fill(~order.local.unsqueeze(-1), 0.0)
        if not spec.weight_on_input:
            slots = slots * weights
        y = x.new_zeros(x.shape, dtype=wide)
        for slot in slots.unbind(1):  # torch.sum would be free to choose another order
            y = y + slot
        return y.to(result_dtype(x, spec.wide)) if out is None else out.copy_(y)


@dataclass(frozen=True, slots=True)
class _Order:
    expert_offsets: Tensor  # (E+1,) int32, exclusive: expert e owns rows [offsets[e], offsets[e+1])
    row_to_slot: Tensor  # (S,) flat slot t*K + k; slots of other ranks' experts come last
    slot_to_row: Tensor  # (S,) its inverse
    local: Tensor  # (T, K) bool: the slot's expert is in the weights


def _sort(topk_ids: Tensor, first_expert: int, num_local: int) -> _Order:
    """A stable sort of the (token, slot) pairs by expert: tokens of one expert stay in order."""
    ids = topk_ids.long() - first_expert
    local = (ids >= 0) & (ids < num_local)
    keys = torch.where(local, ids, num_local).flatten()
    keys, row_to_slot = torch.sort(keys, stable=True)
    experts = torch.arange(num_local + 1, device=keys.device)
    expert_offsets = torch.searchsorted(keys, experts).to(torch.int32)
    rows = torch.arange(keys.numel(), device=keys.device)
    slot_to_row = torch.empty_like(rows).scatter_(0, row_to_slot, rows)
    return _Order(expert_offsets, row_to_slot, slot_to_row, local)


def _activate(hidden: Tensor, spec: ExpertsSpec) -> Tensor:
    """(S, 2I) -> (S, I) for a gated activation, (S, I) -> (S, I) for another one."""
    activation = spec.activation
    gate: Tensor = hidden
    up: Tensor | None = None
    if activation.gated and spec.interleaved:
        gate, up = hidden[:, ::2], hidden[:, 1::2]
    elif activation.gated:
        gate, up = hidden.chunk(2, dim=1)
    return activation.apply(gate, up)


class _GroupedMatmul(torch.autograd.Function):
    """y[rows of e] = a[rows of e] @ b[e].T + bias[e].

    Rows past the last offset are 0, forward and backward, whatever they hold; so is the gradient of
    an expert without rows. fp16 gives fp32, since an expert's output may pass fp16's 65504.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, offsets)
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = _rows_by_experts(a, b, offsets)
        if bias is not None:
            rows = torch.arange(a.shape[0], device=a.device, dtype=offsets.dtype)
            expert = torch.searchsorted(offsets[1:], rows, right=True).clamp_(max=b.shape[0] - 1)
            y += bias.index_select(0, expert)
            _clear_tail(y, offsets)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        a, b, offsets = ctx.saved_tensors
        da = db = dbias = None
        if ctx.needs_input_grad[0]:
            da = _rows_by_experts(dy, b.transpose(1, 2), offsets).to(a.dtype)
        if ctx.needs_input_grad[1]:
            db = _outer_by_experts(dy, a, offsets).to(b.dtype)
        if ctx.needs_input_grad[2]:
            wide = dy.to(torch.promote_types(dy.dtype, torch.float32))
            dbias = torch.segment_reduce(
                wide, "sum", offsets=offsets.long(), axis=0, unsafe=True, initial=0
            )
            dbias = dbias.to(ctx.bias_dtype)
        return da, db, dbias, None


def _rows_by_experts(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """(S, D) rows times (E, N, D) -> (S, N)."""
    if _groupable(a, b):
        return _clear_tail(F.grouped_mm(a, b.transpose(1, 2), offs=offsets[1:]), offsets)
    y = a.new_zeros(a.shape[0], b.shape[1], dtype=_result_dtype(b.dtype))
    if a.shape[0] == 0:
        return y
    for e, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start < end:
            _matmul(a[start:end], b[e].t(), out=y[start:end])
    return y


def _outer_by_experts(dy: Tensor, a: Tensor, offsets: Tensor) -> Tensor:
    """(S, N) and (S, D) rows -> (E, N, D), for each expert dy.T @ a over its rows."""
    if _groupable(dy, a):
        db = F.grouped_mm(dy.t(), a, offs=offsets[1:])
        return db.masked_fill_((offsets[1:] == offsets[:-1])[:, None, None], 0.0)
    db = a.new_zeros(offsets.shape[0] - 1, dy.shape[1], a.shape[1])
    if a.shape[0] == 0:
        return db
    for e, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start < end:
            _matmul(dy[start:end].t(), a[start:end], out=db[e])
    return db


def _clear_tail(y: Tensor, offsets: Tensor) -> Tensor:
    """Zero the rows past the last offset, in place and without a host sync."""
    tail = torch.arange(y.shape[0], device=y.device) >= offsets[-1]
    return y.masked_fill_(tail[:, None], 0.0)


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype


def _matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    if torch.float16 not in (a.dtype, b.dtype):
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        out.copy_(torch.mm(a.half(), b.half(), out_dtype=torch.float32))
    else:
        out.copy_(a.float() @ b.float())


def _groupable(*operands: Tensor) -> bool:
    """Whether torch's grouped GEMM takes these: a loop over experts would wait for the device."""
    return hasattr(F, "grouped_mm") and all(
        x.is_cuda
        and x.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and x.numel() > 0
        and _aligned(x)
        for x in operands
    )


def _aligned(x: Tensor) -> bool:
    """Whether one of the last two dimensions is contiguous and all else starts at 16 bytes."""
    (rows, columns), (row_stride, column_stride) = x.shape[-2:], x.stride()[-2:]
    by_rows = column_stride == 1 and row_stride >= columns
    by_columns = row_stride == 1 and column_stride >= rows
    starts = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride() if stride != 1)]
    return (by_rows or by_columns) and all(start % 16 == 0 for start in starts)
