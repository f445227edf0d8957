"""Expert id and routing weight of a slot in one int32, as FlashInfer's kernels take them.

bits 31 ... 16: the expert's id, 16 bits with a sign; -1 is a dropped slot
bits 15 ...  0: the weight in bfloat16, sign bit included
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import expect, expect_tensor

LARGEST_ID = 2**15 - 1
WEIGHT_BITS = 0xFFFF


def pack_topk(topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """ids (..., K) int32 or int64 and weights (..., K) of any float dtype -> (..., K) int32.

    Weights are rounded to bfloat16, to the nearest even; infinities, NaN and -0 stay what they are.
    The weight's bits are masked before they meet the id: a negative weight, widened to 32 bits with
    its sign, would overwrite the id with ones.

    Ids from 0 to 32767 fit, and every negative id becomes -1, a slot that FlashInfer skips. A
    larger id is a ``ValueError`` on the CPU; on a GPU, where looking would mean waiting for the
    device, it becomes -1 too. It never becomes another expert.
    """
    op = "pack_topk"
    expect_tensor(topk_ids, op, "topk_ids")
    expect_tensor(topk_weights, op, "topk_weights")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: topk_ids must have dtype int32 or int64, got {topk_ids.dtype}")
    if not topk_weights.is_floating_point():
        raise TypeError(
            f"{op}: topk_weights must have a floating-point dtype, got {topk_weights.dtype}"
        )
    ok = topk_weights.shape == topk_ids.shape
    wanted = f"of shape {tuple(topk_ids.shape)}, as topk_ids"
    expect(ok, op, "topk_weights", wanted, tuple(topk_weights.shape))
    if topk_ids.device.type == "cpu" and topk_ids.numel() and not torch.compiler.is_compiling():
        largest = int(topk_ids.max())
        expect(largest <= LARGEST_ID, op, "topk_ids", f"at most {LARGEST_ID}", largest)
    fits = (topk_ids >= 0) & (topk_ids <= LARGEST_ID)
    ids = torch.where(fits, topk_ids, -1).int()
    bits = topk_weights.detach().to(torch.bfloat16).view(torch.int16).int() & WEIGHT_BITS
    return (ids << 16) | bits


def unpack_topk(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(..., K) int32 -> ids (..., K) int32 and weights (..., K) bfloat16, the bits unchanged."""
    expect_tensor(packed, "unpack_topk", "packed")
    if packed.dtype != torch.int32:
        raise TypeError(f"unpack_topk: packed must have dtype int32, got {packed.dtype}")
    return packed >> 16, (packed & WEIGHT_BITS).to(torch.int16).view(torch.bfloat16)
