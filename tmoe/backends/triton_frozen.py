"""The backward of experts whose weights are frozen, and of adapters on them, as Triton kernels.

    low₁ = x[t]·A₁ᵀ   h = x[t]·gate_upᵀ + low₁·B₁ᵀ + b₁   a = act(h)
    low₂ = a·A₂ᵀ      d = a·downᵀ + low₂·B₂ᵀ + b₂         y[t] = Σ_k w·d               (forward)

    e₂       = dy[t] · B₂                          thin
    g        = dy[t] · down + e₂ · A₂              grouped GEMM, dy gathered on the way in
    d_h, w·a, d_w = from h, g and w                one pass over the rows
    d_B₂     = Σ_s dy[t]ᵀ ⊗ (w·a·A₂ᵀ)              d_A₂ = Σ_s e₂ᵀ ⊗ (w·a)
    e₁       = d_h · B₁                            thin
    d_B₁     = Σ_s d_hᵀ ⊗ low₁                     d_A₁ = Σ_s e₁ᵀ ⊗ x[t]
    d_x[t]   = Σ_k (d_h · gate_up + e₁ · A₁)       grouped GEMM, then combine

Quantised weights are multiplied along their rows as they lie (`frozen_gradient.py`); the rounding
of inputs counts for nothing. Where the routing weight is on the input, it multiplies x instead of
d. A step that no wanted gradient needs isn't taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tmoe.kernels.backward_tiles import factor_gradient_tile
from tmoe.kernels.bias_gradient import bias_gradient
from tmoe.kernels.clear_tail import clear_tail
from tmoe.kernels.frozen_gradient import frozen_gradient
from tmoe.kernels.grouped_gemm import grouped_gemm
from tmoe.kernels.low_rank import LowRankRows
from tmoe.kernels.permute import permute
from tmoe.kernels.sort import SortedTokens, sort_tokens, tile_rows
from tmoe.kernels.tiles import Tile, frozen_gradient_tile
from tmoe.kernels.weight_gradient import weight_gradient

from ..dispatch.problem import Adapters, ExpertsSpec, ExpertTensors, FrozenGradients, GemmGradients
from ..formats import QuantizedTensor
from .triton_low_rank import through
from .triton_quantized import weight_scales
from .triton_training import (
    backward_tiles,
    input_gradients,
    through_activation,
    with_unit_stride,
)


def frozen_backward(
    dy: Tensor,
    tensors: ExpertTensors,
    spec: ExpertsSpec,
    adapters: Adapters,
    hidden: Tensor,
    wanted: FrozenGradients,
    may_write_hidden: bool,
) -> FrozenGradients:
    """See `tmoe.dispatch.backend.Backend.frozen_backward`; `hidden` is what was kept;
    its gradient takes its place where that may be."""
    x, gate_up_proj, down_proj, topk_weights, topk_ids, gate_up_bias, down_bias = tensors
    (T, K), (E, H, I) = topk_ids.shape, down_proj.shape
    S = T * K
    tiles = backward_tiles(x, (gate_up_proj, down_proj), S / spec.num_experts, I)
    block_m = tiles.d_activated.block_m
    order = sort_tokens(topk_ids, num_experts=E, first_expert=spec.first_expert, block_m=block_m)
    dy = with_unit_stride(dy).to(x.dtype)
    weights = topk_weights.contiguous()
    on_input, on_output = (weights, None) if spec.weight_on_input else (None, weights)
    of_down, of_gate_up = wanted.down_a or wanted.down_b, wanted.gate_up_a or wanted.gate_up_b
    needs_rows = wanted.x or (wanted.topk_weights and spec.weight_on_input)
    needs_hidden = needs_rows or of_gate_up or wanted.gate_up_bias
    gradients: dict[str, Tensor] = {}
    # One after another: dy and x in expert order, and the products that d_x sums up.
    rows = x.new_empty(S, H)

    e2 = None
    if adapters.down_b is not None and (needs_hidden or of_down or wanted.topk_weights):
        e2 = through(dy, adapters.down_b.transpose(1, 2), order, gather=True)
    grad = d_hidden = activated = d_weight = None
    if needs_hidden or (wanted.topk_weights and not spec.weight_on_input):
        adapter = None
        if e2 is not None and adapters.down_a is not None:
            adapter = LowRankRows(e2, adapters.down_a.transpose(1, 2))
        grad = _along_rows(
            x.new_empty(S, I), dy, down_proj, order, tiles.d_activated, gather=True, adapter=adapter
        )
        if needs_hidden:
            d_hidden = hidden if may_write_hidden else torch.empty_like(hidden)
        if wanted.topk_weights and not spec.weight_on_input:
            d_weight = torch.zeros((T, K), dtype=torch.float32, device=x.device)
            gradients["topk_weights"] = d_weight
    if of_down:
        activated = x.new_empty(S, I) if grad is None else grad
    if grad is not None or activated is not None:
        through_activation(
            hidden, grad, order, spec, d_hidden=d_hidden, activated=activated, d_weight=d_weight,
            row_weight=on_output, dy=dy, bias=down_bias,
        )  # fmt: skip
    if wanted.down_bias:
        assert down_bias is not None
        gradients["down_bias"] = bias_gradient(
            torch.empty_like(down_bias), dy, order, gather=True, row_weight=on_output
        )
    if of_down:
        assert activated is not None and e2 is not None
        gradients |= _of_down_factors(adapters, e2, activated, dy, rows, order, wanted)
    del grad, activated, e2
    if d_hidden is None:
        return _finished(gradients, topk_weights)
    if wanted.gate_up_bias:
        assert gate_up_bias is not None
        gradients["gate_up_bias"] = bias_gradient(torch.empty_like(gate_up_bias), d_hidden, order)
    adapter = None
    if adapters.gate_up_a is not None and adapters.gate_up_b is not None:
        e1 = through(d_hidden, adapters.gate_up_b.transpose(1, 2), order)
        adapter = LowRankRows(e1, adapters.gate_up_a.transpose(1, 2))
        gradients |= _of_gate_up_factors(adapters, e1, d_hidden, x, on_input, rows, order, wanted)
    if not needs_rows:
        return _finished(gradients, topk_weights)
    _along_rows(rows, d_hidden, gate_up_proj, order, tiles.d_rows, adapter=adapter)
    gradients |= input_gradients(rows, x, on_input, order, wanted)
    return _finished(gradients, topk_weights)


def _of_down_factors(
    adapters: Adapters, e2: Tensor, activated: Tensor, dy: Tensor, rows: Tensor,
    order: SortedTokens, wanted: FrozenGradients,
) -> dict[str, Tensor]:  # fmt: skip
    """The wanted gradients of A₂ and B₂. `rows` is written to."""
    a, b, found = adapters.down_a, adapters.down_b, {}
    assert a is not None and b is not None
    if wanted.down_b:
        low = through(activated, a, order)
        found["down_b"] = _factor(b, permute(rows, dy, order), low, order.expert_offsets)
    if wanted.down_a:
        found["down_a"] = _factor(a, e2, activated, order.expert_offsets)
    return found


def _of_gate_up_factors(
    adapters: Adapters, e1: Tensor, d_hidden: Tensor, x: Tensor, on_input: Tensor | None,
    rows: Tensor, order: SortedTokens, wanted: FrozenGradients,
) -> dict[str, Tensor]:  # fmt: skip
    """The wanted gradients of A₁ and B₁. `rows` is written to."""
    a, b, found = adapters.gate_up_a, adapters.gate_up_b, {}
    assert a is not None and b is not None
    if wanted.gate_up_b:
        low = through(x, a, order, gather=True, row_weight=on_input)
        found["gate_up_b"] = _factor(b, d_hidden, low, order.expert_offsets)
    if wanted.gate_up_a:
        inputs = permute(rows, x, order, row_weight=on_input)
        found["gate_up_a"] = _factor(a, e1, inputs, order.expert_offsets)
    return found


def frozen_gemm_backward(
    dy: Tensor,
    b: QuantizedTensor,
    expert_offsets: Tensor,
    bias: Tensor | None,
    wanted: GemmGradients,
) -> GemmGradients:
    """See `tmoe.dispatch.backend.Backend`."""
    (S, _), (E, N, D) = dy.shape, b.shape
    tiles = backward_tiles(dy, (b,), S / E, min(N, D))
    dy, expert_offsets = with_unit_stride(dy), expert_offsets.contiguous()
    order = tile_rows(expert_offsets, S, block_m=tiles.d_rows.block_m)
    d_a = d_bias = None
    if wanted.a:
        d_a = _along_rows(dy.new_empty(S, D), dy, b, order, tiles.d_rows, adapter=None)
        clear_tail(d_a, expert_offsets)
    if wanted.bias:
        assert bias is not None
        d_bias = bias_gradient(torch.empty_like(bias), dy, order)
    return GemmGradients(d_a, None, d_bias)


def _finished(gradients: dict[str, Tensor], topk_weights: Tensor) -> FrozenGradients:
    if "topk_weights" in gradients:
        gradients["topk_weights"] = gradients["topk_weights"].to(topk_weights.dtype)
    return FrozenGradients(**gradients)


def _along_rows(
    out: Tensor,
    rows: Tensor,
    weight: Tensor,
    order: SortedTokens,
    tile: Tile,
    *,
    adapter: LowRankRows | None,
    gather: bool = False,
) -> Tensor:
    """rows · weight[e], and what joins it."""
    if not isinstance(weight, QuantizedTensor):
        return grouped_gemm(
            out, rows, weight.transpose(1, 2), order, tile, gather=gather, adapter=adapter
        )
    tile = frozen_gradient_tile(tile.block_m, rows.dtype, weight.format, rows.device)
    return frozen_gradient(
        out, rows, weight.data, order, tile,
        scales=weight_scales(weight), gather=gather, adapter=adapter,
    )  # fmt: skip


def _factor(factor: Tensor, left: Tensor, right: Tensor, expert_offsets: Tensor) -> Tensor:
    """The gradient of an adapter's factor, computed as the factor is stored."""
    _, rows, columns = factor.shape
    if factor.stride(2) != 1 and factor.stride(1) == 1:
        rows, columns = columns, rows
    tile = factor_gradient_tile(rows, columns, factor.dtype)
    return weight_gradient(torch.empty_like(factor), left, right, expert_offsets, tile)
