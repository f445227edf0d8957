"""Adapters as Triton kernels: one thin grouped GEMM, whose result joins the wide one."""

from __future__ import annotations

from torch import Tensor

from tmoe.kernels.grouped_gemm import grouped_gemm
from tmoe.kernels.low_rank import LowRankRows
from tmoe.kernels.sort import SortedTokens
from tmoe.kernels.tiles import low_rank_tile


def low_rank_rows(
    rows: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    order: SortedTokens,
    *,
    gather: bool = False,
    row_weight: Tensor | None = None,
) -> LowRankRows | None:
    """What joins a product of `rows` ((S, D), with `gather` (T, D)): rows · a[e].T and b[e], for an
    adapter a (E, rank, D), b (E, N, rank); None without one."""
    if a is None or b is None:
        return None
    return LowRankRows(through(rows, a, order, gather=gather, row_weight=row_weight), b)


def through(
    rows: Tensor,
    factor: Tensor,
    order: SortedTokens,
    *,
    gather: bool = False,
    row_weight: Tensor | None = None,
) -> Tensor:
    """rows · factor[e].T (S, rank), for a factor (E, rank, D) of any strides."""
    rank, S = factor.shape[1], order.row_to_slot.shape[0]
    tile = low_rank_tile(order.block_m, rank, rows.dtype, rows.device)
    return grouped_gemm(
        rows.new_empty(S, rank), rows, factor, order, tile,
        gather=gather, row_weight=row_weight, weight_on_input=True,
    )  # fmt: skip
