"""The collectives with their gradients. What one sends forward, its partner sends back.

    copy to all (nothing)   ↔  sum over all       tokens that are the same on every rank
    gather                  ↔  reduce-scatter     tokens of each rank, for all to see
    part                    ↔  join               a share of tokens that are the same on every rank
    exchange rows           ↔  exchange back      rows that go to the ranks of their experts
    first only              ↔  sum over all       a bias that must be added once

Sums are taken in float32 (float64 of float64) and rounded once. A gradient is that of the sum of
all ranks' losses where tokens differ, and of the one loss that all compute where they are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import groups
from .groups import Group, Pending


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are taken in."""
    return torch.promote_types(dtype, torch.float32)


def _sum(x: Tensor, group: Group, step: str) -> Tensor:
    total = groups.all_reduce(x.to(wide(x.dtype), copy=True).contiguous(), group, step)
    return total.to(x.dtype)


class _CopyToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _sum(dy, ctx.group, "the sum of gradients of tokens"), None


def copy_to_all(x: Tensor, group: Group) -> Tensor:
    """x, which is the same on all ranks of the group; its gradient is the sum of theirs."""
    if group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _CopyToAll.apply(x, group)


class _SumOverAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, step: str) -> Tensor:
        return groups.all_reduce(x.clone(), group, step)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy, None, None


def sum_over_all(x: Tensor, group: Group, step: str) -> Tensor:
    """The sum over ranks, which all get. x, a new tensor in the sum's dtype, may be overwritten."""
    if group.size == 1:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return _SumOverAll.apply(x, group, step)
    return groups.all_reduce(x, group, step)


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, step: str) -> Tensor:
        ctx.group, ctx.step = group, step
        return groups.reduce_scatter(x, group, step)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return groups.all_gather(dy, ctx.group, f"the gradient of {ctx.step}"), None, None


def reduce_scatter(x: Tensor, group: Group, step: str) -> Tensor:
    """(size · n, ...) of each rank -> the sums of this rank's (n, ...)."""
    return x if group.size == 1 else _ReduceScatter.apply(x, group, step)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, pending: Pending) -> Tensor:
        ctx.group, ctx.step = group, pending.step
        return groups.all_gather(x, group, pending.step, pending)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        step = f"the gradient of {ctx.step}"
        dx = groups.reduce_scatter(dy.to(wide(dy.dtype)), ctx.group, step)
        return dx.to(dy.dtype), None, None


def gather(x: Tensor, group: Group, pending: Pending) -> Tensor:
    """(n, ...) of each rank -> (size · n, ...), once `pending` has been waited for."""
    return x if group.size == 1 else _Gather.apply(x, group, pending)


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: list[int], receive: list[int], group: Group, pending: Pending
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group, ctx.step = send, receive, group, pending.step
        return groups.all_to_all(x, send, receive, group, pending.step, pending)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        step = f"the gradient of {ctx.step}"
        dx = groups.all_to_all(dy, ctx.receive, ctx.send, ctx.group, step)
        return dx, None, None, None, None


def exchange(
    x: Tensor,
    send: list[int],
    receive: list[int],
    group: Group,
    pending: Pending,
    out: Tensor | None = None,
) -> Tensor:
    """Rows for each rank -> rows from each rank, once `pending` has been waited for. `out` is
    written instead of a new tensor; not with gradients."""
    if group.size == 1:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        assert out is None, "what gradients are needed of isn't written in place"
        return _Exchange.apply(x, send, receive, group, pending)
    return groups.all_to_all(x, send, receive, group, pending.step, pending, out)


class _Part(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.rows = group, x.shape[0]
        return x[part(x.shape[0], group)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _join(dy, ctx.rows, ctx.group, "the gradient of a share of tokens"), None


def take_part(x: Tensor, group: Group) -> Tensor:
    """This rank's share of rows that are the same on all ranks."""
    return x if group.size == 1 else _Part.apply(x, group)


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, group: Group) -> Tensor:
        ctx.group = group
        return _join(x, rows, group, "joining the shares of tokens")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy[part(dy.shape[0], ctx.group)], None, None


def join(x: Tensor, rows: int, group: Group) -> Tensor:
    """All shares, on every rank: the opposite of `take_part`."""
    return x if group.size == 1 else _Join.apply(x, rows, group)


def part(rows: int, group: Group, rank: int | None = None) -> slice:
    """Which rows are a rank's share; they differ in size by one at most."""
    rank = group.rank if rank is None else rank
    return slice(rows * rank // group.size, rows * (rank + 1) // group.size)


def _join(x: Tensor, rows: int, group: Group, step: str) -> Tensor:
    sizes = [rows * (r + 1) // group.size - rows * r // group.size for r in range(group.size)]
    most = max(sizes)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: x.shape[0]] = x
    shares = groups.all_gather(padded, group, step).unflatten(0, (group.size, most))
    return torch.cat([share[:size] for share, size in zip(shares, sizes, strict=True)])


class _FirstOnly(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x) if group.rank == 0 else torch.zeros_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        mine = dy if ctx.group.rank == 0 else torch.zeros_like(dy)
        return _sum(mine, ctx.group, "the gradient of a bias"), None


def first_only(x: Tensor | None, group: Group) -> Tensor | None:
    """x on the first rank, zeros on the others: what the sum over ranks must contain once."""
    return x if x is None or group.size == 1 else _FirstOnly.apply(x, group)


class _RowsOfTokens(Function):
    """rows[i] = x[tokens[i]], and back: the sum of a token's rows, in the order of `rows_of`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows_of: Tensor) -> Tensor:
        ctx.save_for_backward(rows_of)
        return x.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (rows_of,) = ctx.saved_tensors
        return sum_rows(dy.to(wide(dy.dtype)), rows_of).to(dy.dtype), None, None


def rows_of_tokens(x: Tensor, tokens: Tensor, rows_of: Tensor) -> Tensor:
    """x (T, ...), tokens (N,) -> (N, ...). `rows_of` (T, P): where a token's rows are, or -1."""
    return _RowsOfTokens.apply(x, tokens, rows_of)


class _SumOfRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, rows_of: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return sum_rows(rows, rows_of)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        if dy.shape[0] == 0:  # no token; with fixed sizes there are rows nevertheless
            return dy.new_zeros(len(tokens), *dy.shape[1:]), None, None
        return dy.index_select(0, tokens), None, None


def sum_of_rows(rows: Tensor, tokens: Tensor, rows_of: Tensor) -> Tensor:
    """The opposite of `rows_of_tokens`: each token's rows, added up in the order of `rows_of`."""
    return _SumOfRows.apply(rows, tokens, rows_of)


def sum_rows(rows: Tensor, rows_of: Tensor) -> Tensor:
    """rows (N, ...), rows_of (T, P) with -1 for none -> (T, ...): sums in the order of P, always
    the same bits. A select, not a product with zero: what stands in an unused row may be NaN."""
    shape = (rows_of.shape[0], *rows.shape[1:])
    total = rows.new_zeros(shape)
    if rows.shape[0] == 0:
        return total
    for column in rows_of.long().unbind(1):
        there = (column >= 0).view(-1, *[1] * (rows.ndim - 1))
        total = total + rows.index_select(0, column.clamp(min=0)).masked_fill(~there, 0.0)
    return total
