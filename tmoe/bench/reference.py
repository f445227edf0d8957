"""How a benchmark, and the test suite, decide that a result is right.

The truth is computed in fp64 (or fp32); the bound is twice the error that torch itself makes doing
the same maths in the dtype under test, so no tolerance is picked by hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tmoe

from ..demo.verdict import experts_in
from ..formats import SCHEMES
from ..formats.recipe import Recipe

CHECKED = 4  # tokens per input that are recomputed


def some_rows(num_rows: int, device: torch.device, wanted: int = CHECKED) -> Tensor:
    """First, last, and evenly between them."""
    return torch.linspace(0, num_rows - 1, min(num_rows, wanted), device=device).long()


def check_experts(
    got: Tensor,
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    weight_on_input: bool = False,
) -> None:
    """Some tokens within twice the error of torch in the same dtype, and no NaN in any."""
    assert got.isfinite().all(), "not finite"
    rows = some_rows(x.shape[0], x.device)
    layer = (x[rows], gate_up_proj, down_proj, topk_weights[rows], topk_ids[rows])
    truth, naive = (
        experts_in(dtype, *layer, weight_on_input=weight_on_input)
        for dtype in (torch.float64, x.dtype)
    )
    assert_matches(got[rows], truth, naive)


def check_quantized_experts(
    got: Tensor,
    x: Tensor,
    gate_up_proj: tmoe.QuantizedTensor,
    down_proj: tmoe.QuantizedTensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    scheme: str,
    scales: dict[str, Any],
) -> None:
    """Some tokens within twice the error of torch on dequantised weights, and no NaN in any."""
    assert got.isfinite().all(), "not finite"
    rows = some_rows(x.shape[0], x.device)
    layer = (x, gate_up_proj, down_proj, topk_weights, topk_ids)
    assert_matches(got[rows], *some_quantized_tokens_ref(rows, *layer, scheme, **scales))


def assert_matches(got: Tensor, truth: Tensor, naive: Tensor, *, factor: float = 2.0) -> None:
    """`got` must be within `factor` times the error of `naive` (torch, same dtype) against `truth`.

    Both the largest and the root-mean-square error are bounded. Torch's error may be small by luck,
    so each bound has a floor at the truth's own scale: one rounding to the dtype and three in fp32
    (after either projection and in the sum over experts).
    """
    assert got.shape == truth.shape, f"shape {tuple(got.shape)}, wanted {tuple(truth.shape)}"
    if got.numel() == 0:
        return
    got64, truth64, naive64 = got.double(), truth.double(), naive.double()
    assert torch.isfinite(got64).all() or not torch.isfinite(truth64).all(), "not finite"
    step = torch.finfo(got.dtype).eps + 3 * torch.finfo(torch.float32).eps
    for what, norm in (
        ("largest", lambda x: x.abs().max()),
        ("rms", lambda x: x.square().mean().sqrt()),
    ):
        error, allowed = (
            norm(got64 - truth64),
            factor * norm(naive64 - truth64) + step * norm(truth64),
        )
        assert error <= allowed, f"{what} error {error:.3e}, allowed {allowed:.3e}"


def rounded(x: Tensor, recipe: Recipe | None, scale: Tensor | None = None) -> Tensor:
    """x (S, D) as the reference quantiser has it, in fp64."""
    if recipe is None:
        return x.double()
    given: dict[str, Any] = {} if scale is None else {_scale_of(recipe): scale}
    with tmoe.options(backend="torch"):
        return quantized(x.float(), recipe, **given).dequantize().double()


def quantized(x: Tensor, recipe: Recipe, **given: Any) -> tmoe.QuantizedTensor:
    return tmoe.quantize(x, recipe.format.name, block_shape=recipe.block_shape, **given)


def _scale_of(recipe: Recipe) -> str:
    """Which keyword of `tmoe.quantize` takes a static scale."""
    return "global_scale" if recipe.format.has_global_scale else "scale"


def quantized_experts_ref(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    scheme: str,
    *,
    input_scale: Tensor | None = None,
    hidden_scale: Tensor | None = None,
    weight_on_input: bool = False,
) -> Tensor:
    """A SwiGLU layer of dequantised weights, (T, H) in fp64, whose rows are rounded where the
    scheme says. All slots at once, so that a scale of the whole matrix sees what it should."""
    recipe = SCHEMES[scheme].inputs
    (T, K), weights = topk_ids.shape, topk_weights.double()
    rows = x.double().repeat_interleave(K, 0)
    if weight_on_input:
        rows = rows * weights.reshape(-1, 1)
    e = topk_ids.flatten()
    rows = rounded(rows, recipe, input_scale)
    gate, up = torch.einsum("sd,snd->sn", rows, gate_up_proj.double()[e]).chunk(2, -1)
    rows = rounded(gate * gate.sigmoid() * up, recipe, hidden_scale)
    y = torch.einsum("sd,snd->sn", rows, down_proj.double()[e]).view(T, K, down_proj.shape[1])
    return y.sum(1) if weight_on_input else (y * weights.unsqueeze(-1)).sum(1)


def some_quantized_tokens_ref(
    some: Tensor,
    x: Tensor,
    gate_up_proj: tmoe.QuantizedTensor,
    down_proj: tmoe.QuantizedTensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    scheme: str,
    **scales: Any,
) -> tuple[Tensor, Tensor]:
    """Tokens `some` of a large layer: by `quantized_experts_ref`, and by torch on dequantised
    weights in the dtype of x. Experts that they don't use stay quantised."""
    used, ids = topk_ids[some].unique(return_inverse=True)
    gate_up, down = (
        torch.stack([weight[e].dequantize() for e in used.tolist()])
        for weight in (gate_up_proj, down_proj)
    )
    layer = (x[some], gate_up, down, topk_weights[some], ids)
    truth = quantized_experts_ref(*layer, scheme, **scales)
    return truth, experts_in(x.dtype, *layer)
