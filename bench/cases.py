"""What the benchmarks share: who runs a call, how many inputs it gets, whether it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import tmoe
from tests.checking import assert_matches
from tests.reference import fused_experts_ref, some_quantized_tokens_ref

CHECKED = 4  # tokens per input that are recomputed


def with_backend(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A function of tmoe, run by that backend and no other."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with tmoe.options(backend=backend):
            return function(*args, **kwargs)

    return run


def num_inputs(num_tokens: int) -> int:
    """How many different inputs a round goes through: more where one call is short."""
    return 8 if num_tokens <= 128 else 3


def num_touched(all_ids: Sequence[Tensor]) -> float:
    """How many experts a call uses, on average over its inputs' topk_ids."""
    return sum(ids.unique().numel() for ids in all_ids) / len(all_ids)


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
        fused_experts_ref(*layer, weight_on_input=weight_on_input, dtype=dtype)
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
    scales: dict[str, Tensor],
) -> None:
    """Some tokens within twice the error of torch on dequantised weights, and no NaN in any."""
    assert got.isfinite().all(), "not finite"
    rows = some_rows(x.shape[0], x.device)
    layer = (x, gate_up_proj, down_proj, topk_weights, topk_ids)
    assert_matches(got[rows], *some_quantized_tokens_ref(rows, *layer, scheme, **scales))
