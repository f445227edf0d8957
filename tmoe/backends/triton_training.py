"""The backward of the experts as Triton kernels.

    h = x[t]·gate_upᵀ + b₁     a = act(h)     d = a·downᵀ + b₂     y[t] = Σ_k w·d        (forward)

    g        = dy[t] · down                      grouped GEMM, dy gathered on the way in
    d_h, w·a, d_w = from h, g and w              one pass over the rows; w·a over g
    d_x[t]   = Σ_k d_h · gate_up                 grouped GEMM, then combine
    d_down   = Σ_s dy[t]ᵀ ⊗ (w·a)                permute dy, then weight gradient
    d_gate_up = Σ_s d_hᵀ ⊗ x[t]                  permute x, then weight gradient

Where the routing weight is on the input, it multiplies x instead of d. A step that no wanted
gradient needs isn't taken. All sums run in an order that the data doesn't decide, so every run
gives the same bits.

Beside the gradients a call allocates, per row, I numbers for g and H for the products that d_x sums
up, whose memory then holds the permuted dy and x. h is kept from the forward or computed again, and
d_h is written over it; into 2I more numbers per row, if h may be needed for one more backward. The
weights' gradients come last: till then nothing of their size exists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tmoe.kernels.activation_backward import activation_backward
from tmoe.kernels.backward_tiles import BackwardTiles, choose_backward_tiles
from tmoe.kernels.bias_gradient import bias_gradient
from tmoe.kernels.clear_tail import clear_tail
from tmoe.kernels.combine import combine
from tmoe.kernels.descriptors import can_describe
from tmoe.kernels.grouped_gemm import grouped_gemm
from tmoe.kernels.permute import permute
from tmoe.kernels.sort import SortedTokens, sort_tokens, tile_rows
from tmoe.kernels.weight_gradient import weight_gradient
from tmoe.kernels.weighted_combine import weighted_combine

from ..dispatch.problem import (
    ExpertGradients,
    ExpertsSpec,
    ExpertTensors,
    FrozenGradients,
    GemmGradients,
)
from ..formats import QuantizedTensor
from ..options import current


def experts_backward(
    dy: Tensor,
    tensors: ExpertTensors,
    spec: ExpertsSpec,
    kept: Tensor | None,
    wanted: ExpertGradients,
    may_write_kept: bool,
    sums: ExpertGradients,
) -> ExpertGradients:
    """See `tmoe.dispatch.backend.Backend.experts_backward`."""
    x, gate_up_proj, down_proj, topk_weights, topk_ids, gate_up_bias, down_bias = tensors
    (T, K), (E, H, I) = topk_ids.shape, down_proj.shape
    S, columns = T * K, gate_up_proj.shape[1]
    tiles = backward_tiles(x, (gate_up_proj, down_proj), S / spec.num_experts, I)
    order = sort_tokens(
        topk_ids,
        num_experts=E,
        first_expert=spec.first_expert,
        block_m=tiles.d_activated.block_m,
    )
    dy, weights = with_unit_stride(dy).to(x.dtype), topk_weights.contiguous()
    on_input, on_output = (weights, None) if spec.weight_on_input else (None, weights)
    needs = _Needs(wanted, spec.weight_on_input)
    gradients: dict[str, Any] = {}

    hidden = kept
    if hidden is None and needs.hidden:
        hidden = grouped_gemm(
            x.new_empty(S, columns), x, gate_up_proj, order, tiles.d_activated, gather=True,
            bias=gate_up_bias, row_weight=on_input, weight_on_input=True,
        )  # fmt: skip
    grad = None
    if needs.d_activated:
        grad = grouped_gemm(
            x.new_empty(S, I), dy, down_proj.transpose(1, 2), order, tiles.d_activated, gather=True
        )
    d_hidden = activated = None
    if needs.hidden:
        assert hidden is not None
        if needs.d_hidden:
            d_hidden = hidden if kept is None or may_write_kept else torch.empty_like(hidden)
        if wanted.down_proj:
            activated = x.new_empty(S, I) if grad is None else grad
        d_weight = None
        if wanted.topk_weights and not spec.weight_on_input:
            d_weight = torch.zeros((T, K), dtype=torch.float32, device=x.device)
            gradients["topk_weights"] = d_weight
        through_activation(
            hidden, grad, order, spec, d_hidden=d_hidden, activated=activated, d_weight=d_weight,
            row_weight=on_output, dy=dy, bias=down_bias,
        )  # fmt: skip
    del hidden, kept, grad

    rows = x.new_empty(S, H) if needs.rows else None
    if needs.d_rows:
        assert d_hidden is not None and rows is not None
        grouped_gemm(rows, d_hidden, gate_up_proj.transpose(1, 2), order, tiles.d_rows)
        gradients |= input_gradients(rows, x, on_input, order, wanted)
    if wanted.topk_weights:
        gradients["topk_weights"] = gradients["topk_weights"].to(topk_weights.dtype)

    if wanted.down_bias:
        assert down_bias is not None
        gradients["down_bias"] = bias_gradient(
            torch.empty_like(down_bias), dy, order, gather=True, row_weight=on_output
        )
    if wanted.down_proj:
        assert activated is not None and rows is not None
        left = permute(rows, dy, order)
        found = _weight_gradient(down_proj, sums.down_proj, left, activated, order, tiles)
        gradients["down_proj"] = found
    del activated
    if wanted.gate_up_bias:
        assert gate_up_bias is not None and d_hidden is not None
        gradients["gate_up_bias"] = bias_gradient(torch.empty_like(gate_up_bias), d_hidden, order)
    if wanted.gate_up_proj:
        assert d_hidden is not None and rows is not None
        right = permute(rows, x, order, row_weight=on_input)
        found = _weight_gradient(gate_up_proj, sums.gate_up_proj, d_hidden, right, order, tiles)
        gradients["gate_up_proj"] = found
    return ExpertGradients(**gradients)


def through_activation(
    hidden: Tensor, grad: Tensor | None, order: SortedTokens, spec: ExpertsSpec, **more: Any
) -> None:
    """`activation_backward` of the activation that `spec` has."""
    activation = spec.activation
    activation_backward(
        hidden, grad, order, activation=activation.name, gated=activation.gated,
        interleaved=spec.interleaved, alpha=activation.alpha, limit=activation.limit, **more,
    )  # fmt: skip


def input_gradients(
    rows: Tensor,
    x: Tensor,
    on_input: Tensor | None,
    order: SortedTokens,
    wanted: ExpertGradients | FrozenGradients,
) -> dict[str, Tensor]:
    """Of x and, where they multiplied it, of the routing weights, as far as they are wanted.
    `rows` are what the first projection's inputs get."""
    slots, d_x = order.slot_to_row, x.new_empty(x.shape) if wanted.x else None
    found = {} if d_x is None else {"x": d_x}
    if on_input is None:
        assert d_x is not None
        combine(rows, slots, d_x)
        return found
    dots = None
    if wanted.topk_weights:
        dots = found["topk_weights"] = torch.empty(
            slots.shape, dtype=torch.float32, device=x.device
        )
    weighted_combine(rows, x, on_input, slots, out=d_x, dots=dots)
    return found


class _Needs:
    """Which intermediate results the wanted gradients need."""

    def __init__(self, wanted: ExpertGradients, weight_on_input: bool) -> None:
        d_input_weight = wanted.topk_weights and weight_on_input
        self.d_rows = wanted.x or d_input_weight
        self.rows = self.d_rows or wanted.down_proj or wanted.gate_up_proj
        self.d_hidden = self.d_rows or wanted.gate_up_proj or wanted.gate_up_bias
        self.d_activated = self.d_hidden or wanted.topk_weights
        self.hidden = self.d_activated or wanted.down_proj


def grouped_gemm_backward(
    dy: Tensor,
    a: Tensor,
    b: Tensor,
    expert_offsets: Tensor,
    bias: Tensor | None,
    wanted: GemmGradients,
    sums: GemmGradients,
) -> GemmGradients:
    """See `tmoe.dispatch.backend.Backend.grouped_gemm_backward`."""
    (S, D), E = a.shape, b.shape[0]
    tiles = backward_tiles(a, (b,), S / E, min(b.shape[1:]))
    dy, expert_offsets = with_unit_stride(dy), expert_offsets.contiguous()
    order = tile_rows(expert_offsets, S, block_m=tiles.d_rows.block_m)
    gradients: dict[str, Any] = {}
    if wanted.a:
        d_a = grouped_gemm(a.new_empty(S, D), dy, b.transpose(1, 2), order, tiles.d_rows)
        gradients["a"] = clear_tail(d_a, expert_offsets)
    if wanted.b:
        gradients["b"] = _weight_gradient(b, sums.b, dy, a, order, tiles)
    if wanted.bias:
        assert bias is not None
        gradients["bias"] = bias_gradient(torch.empty_like(bias), dy, order)
    return GemmGradients(**gradients)


def _weight_gradient(
    weight: Tensor,
    total: Tensor | None,
    left: Tensor,
    right: Tensor,
    order: SortedTokens,
    tiles: BackwardTiles,
) -> Tensor | None:
    """The gradient of `weight`, or None: it was added to `total`."""
    offsets = order.expert_offsets
    if total is None:
        return weight_gradient(torch.empty_like(weight), left, right, offsets, tiles.weights)
    weight_gradient(total, left, right, offsets, tiles.weights, accumulate=True)
    return None


def backward_tiles(
    x: Tensor, weights: tuple[Tensor, ...], rows_per_expert: float, intermediate: int
) -> BackwardTiles:
    return choose_backward_tiles(
        x.device,
        x.dtype,
        rows_per_expert=rows_per_expert,
        intermediate=intermediate,
        described=all(not isinstance(w, QuantizedTensor) and can_describe(w) for w in weights),
        batch_invariant=current().batch_invariant,
    )


def with_unit_stride(rows: Tensor) -> Tensor:
    """A gradient may be one number, expanded."""
    return rows if rows.stride(1) == 1 else rows.contiguous()
