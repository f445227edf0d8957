"""Each expert's rows times its matrix in plain torch, and the derivative of that."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class GroupedMatmul(torch.autograd.Function):
    """y[rows of e] = a[rows of e] @ b[e].T + bias[e].

    Rows past the last offset are 0, forward and backward, whatever they hold; so is the gradient of
    an expert without rows. fp16 gives fp32, since an expert's output may pass fp16's 65504. With
    y given, that is the result, and only the backward is left to do.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, offsets: Tensor,
        y: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(a, b, offsets)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if y is not None:
            return y.detach()
        y = _rows_by_experts(a, b, offsets)
        if bias is not None:
            rows = torch.arange(a.shape[0], device=a.device, dtype=offsets.dtype)
            expert = torch.searchsorted(offsets[1:], rows, right=True).clamp_(max=b.shape[0] - 1)
            y += bias.index_select(0, expert)
            clear_tail(y, offsets)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
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
        return da, db, dbias, None, None


def _rows_by_experts(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """(S, D) rows times (E, N, D) -> (S, N)."""
    if _groupable(a, b):
        return clear_tail(F.grouped_mm(a, b.transpose(1, 2), offs=offsets[1:]), offsets)
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


def clear_tail(y: Tensor, offsets: Tensor) -> Tensor:
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
