"""The experts in plain torch: on every device, differentiable, and where gradients come from.

Rows are gathered by expert, multiplied expert by expert, put back and summed, each a visible step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.kernels.route_ref import count_ref, route_ref, softmax_ref

from ..dispatch.backend import NO_ADAPTERS, NO_SCALES
from ..dispatch.problem import (
    Adapters,
    ExpertGradients,
    ExpertsSpec,
    ExpertTensors,
    FrozenGradients,
    GemmGradients,
    Problem,
    Routed,
    RouteInputs,
    StaticScales,
)
from ..formats import QuantizedTensor
from ..formats.compute import quantize_parts
from ..formats.recipe import Recipe
from ..formats.scheme import SCHEMES
from ..routing import Routing
from .torch_grouped import GroupedMatmul, clear_tail
from .torch_quantized import project, rounded


class TorchBackend:
    """See `tmoe.dispatch.backend.Backend` for what the methods take and return."""

    name = "torch"

    def why_not(self, problem: Problem) -> str | None:
        if problem.batch_invariant and problem.op not in ("route", "quantize"):
            return "not batch invariant: torch's matmul picks its kernel by the number of rows"
        if problem.needs_grad and problem.coded:
            return "an input that is quantised already has no backward, and gradients are needed"
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
            rows = clear_tail(a.to(torch.float32, copy=True), expert_offsets)
            rows = rounded(rows, inputs, scale, expert_offsets)
            y = project(rows, b, bias, expert_offsets).to(a.dtype)
        else:
            y = GroupedMatmul.apply(a, b, bias, expert_offsets).to(a.dtype)
        return y if out is None else out.copy_(y)

    def fused_experts(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        out: Tensor | None = None,
        scales: StaticScales = NO_SCALES,
        adapters: Adapters = NO_ADAPTERS,
    ) -> Tensor:
        y, _ = self._experts(tensors, spec, scales, adapters)
        return y if out is None else out.copy_(y)

    def train_experts(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
    ) -> tuple[Tensor, Tensor]:
        y, product = self._experts(tensors, spec)
        return y, product.to(tensors.x.dtype)

    def experts_backward(
        self,
        dy: Tensor,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        kept: Tensor | None,
        wanted: ExpertGradients,
        may_write_kept: bool,
        sums: ExpertGradients,
    ) -> ExpertGradients:
        """The forward again, from what was kept on, and its derivative by autograd."""
        leaves = ExpertGradients(*_leaves([getattr(tensors, f) for f in wanted._fields], wanted))
        with torch.enable_grad():
            y, _ = self._experts(tensors._replace(**leaves._asdict()), spec, product=kept)
        return ExpertGradients(*_gradients(y, leaves, wanted, dy, sums))

    def train_frozen(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        scales: StaticScales,
        adapters: Adapters,
    ) -> tuple[Tensor, Tensor]:
        y, product = self._experts(tensors, spec, scales, adapters)
        return y, product.to(tensors.x.dtype)

    def frozen_backward(
        self,
        dy: Tensor,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        scales: StaticScales,
        adapters: Adapters,
        kept: Tensor | None,
        wanted: FrozenGradients,
        may_write_kept: bool,
    ) -> FrozenGradients:
        """The whole forward again, and its derivative by autograd."""
        x, topk_weights, biases = tensors.x, tensors.topk_weights, tensors[5:]
        leaves = _leaves((x, topk_weights, *biases, *adapters), wanted)
        x, topk_weights, gate_up_bias, down_bias, *rest = leaves
        tensors = tensors._replace(
            x=x, topk_weights=topk_weights, gate_up_bias=gate_up_bias, down_bias=down_bias
        )
        with torch.enable_grad():
            y, _ = self._experts(tensors, spec, scales, Adapters(*rest))
        return FrozenGradients(*_gradients(y, leaves, wanted, dy, FrozenGradients()))

    def grouped_gemm_backward(
        self, dy: Tensor, a: Tensor, b: Tensor, expert_offsets: Tensor, bias: Tensor | None,
        wanted: GemmGradients, sums: GemmGradients,
    ) -> GemmGradients:  # fmt: skip
        leaves = _leaves((a, b, bias), wanted)
        with torch.enable_grad():
            y = GroupedMatmul.apply(*leaves, expert_offsets).to(a.dtype)
        return GemmGradients(*_gradients(y, leaves, wanted, dy, sums))

    def _experts(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        scales: StaticScales = NO_SCALES,
        adapters: Adapters = NO_ADAPTERS,
        product: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The result, and what was activated; `product` is that, if it is known."""
        x, gate_up_proj, down_proj, topk_weights, topk_ids, gate_up_bias, down_bias = tensors
        (T, K), H = topk_ids.shape, x.shape[1]
        dtype, is_coded = x.dtype, isinstance(x, QuantizedTensor)
        wide = torch.promote_types(dtype, torch.float32)
        x = x.dequantize() if isinstance(x, QuantizedTensor) else x  # what the codes stand for
        order = _sort(topk_ids, spec.first_expert, gate_up_proj.shape[0])
        # Selects, not products with zero: what stands in a dropped slot may be NaN.
        weights = topk_weights.to(wide).masked_fill(~order.local, 0.0).unsqueeze(-1)  # (T, K, 1)

        # One row per slot before the gather, so that its backward sums over K in one fixed order.
        slots = x.unsqueeze(1).expand(T, K, H)
        if spec.weight_on_input:
            slots = slots * weights
            slots = slots if spec.scheme else slots.to(dtype)
        rows = slots.reshape(T * K, H).index_select(0, order.row_to_slot)
        offsets = order.expert_offsets
        if isinstance(gate_up_proj, QuantizedTensor) and isinstance(down_proj, QuantizedTensor):
            inputs = SCHEMES[spec.scheme].inputs if spec.scheme else None
            rows = clear_tail(rows.float(), offsets)
            codes = rows if is_coded else rounded(rows, inputs, scales.input, offsets)
            product = project(codes, gate_up_proj, gate_up_bias, offsets)
            product = _add_low_rank(product, rows, *adapters[:2], offsets)
            rows = clear_tail(_activate(product, spec), offsets)
            codes = rounded(rows, inputs, scales.hidden, offsets)
            result = project(codes, down_proj, down_bias, offsets)
            rows = _add_low_rank(result, rows, *adapters[2:], offsets)
        else:
            product = GroupedMatmul.apply(rows, gate_up_proj, gate_up_bias, offsets, product)
            product = _add_low_rank(product, rows, *adapters[:2], offsets)
            rows = _activate(product.to(wide), spec).to(dtype)
            result = GroupedMatmul.apply(rows, down_proj, down_bias, offsets)
            rows = _add_low_rank(result, rows, *adapters[2:], offsets)

        slots = rows.index_select(0, order.slot_to_row).view(T, K, H)
        slots = slots.masked_fill(~order.local.unsqueeze(-1), 0.0)
        if not spec.weight_on_input:
            slots = slots * weights
        y = x.new_zeros(x.shape, dtype=wide)
        for slot in slots.unbind(1):  # torch.sum would be free to choose another order
            y = y + slot
        return y.to(wide if spec.wide else dtype), product


def _leaves(inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Any]:
    """The inputs cut off from what made them; those that a gradient is wanted of require it."""
    return [
        None if tensor is None else tensor.detach().requires_grad_(needed)
        for tensor, needed in zip(inputs, wanted, strict=True)
    ]


def _gradients(
    y: Tensor,
    leaves: Sequence[Any],
    wanted: Sequence[bool],
    dy: Tensor,
    sums: Sequence[Tensor | None],
) -> Iterator[Tensor | None]:
    found = iter(torch.autograd.grad(y, list(compress(leaves, wanted)), dy))
    for needed, total in zip(wanted, sums, strict=True):
        gradient = next(found) if needed else None
        if gradient is not None and total is not None:
            total.add_(gradient)
            gradient = None
        yield gradient


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


def _add_low_rank(
    product: Tensor, rows: Tensor, a: Tensor | None, b: Tensor | None, offsets: Tensor
) -> Tensor:
    """product (S, N) + (rows (S, D) @ a[e].T) @ b[e].T"""
    if a is None or b is None:
        return product
    low = GroupedMatmul.apply(rows.to(a.dtype), a, None, offsets).to(a.dtype)
    return product + GroupedMatmul.apply(low, b, None, offsets)


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
