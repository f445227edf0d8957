"""How much memory a training step takes at its peak: all of it, and without the gradients.

The gradients of the weights have to exist in the end, whoever computes them. What differs is
everything else: what the forward keeps, and what comes and goes in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_EVENTS = 100_000


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes that are held at one time, at most, beside what was there before."""

    whole: int
    activations: int  # without the blocks that hold the weights' gradients in the end
    kept: int  # between forward and backward


def peak_memory(
    forward: Callable[[], Tensor],
    backward: Callable[[Tensor], Sequence[Tensor]],
    is_weight: Sequence[bool],
) -> Peaks:
    """Of one step. `backward` returns the gradients, `is_weight` says which are of weights.

    Read from the trace of torch's allocator, in which every block is as large as it was asked for.
    A block of a weight's gradient doesn't count from when it is allocated, other blocks of the same
    size do. On a GPU only, and after a first call, which allocates what stays.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(
        "all", context=None, stacks="python", max_entries=MAX_EVENTS
    )
    try:
        y = forward()
        kept = torch.cuda.memory_allocated() - before
        gradients = backward(y)
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(None)
    blocks = {
        gradient.untyped_storage().data_ptr()
        for gradient, weight in zip(gradients, is_weight, strict=True)
        if weight
    }
    last = {e["addr"]: i for i, e in enumerate(events) if e["action"] == "alloc"}
    theirs = {last[address] for address in blocks}
    sizes: dict[int, tuple[int, bool]] = {}
    held, most = [0, 0], [0, 0]
    for i, event in enumerate(events):
        if event["action"] == "alloc":
            sizes[event["addr"]] = (event["size"], i in theirs)
            sign, (size, weight) = 1, sizes[event["addr"]]
        elif event["action"] == "free_completed" and event["addr"] in sizes:
            sign, (size, weight) = -1, sizes.pop(event["addr"])
        else:
            continue
        held[0] += sign * size
        held[1] += 0 if weight else sign * size
        most = [max(pair) for pair in zip(most, held, strict=True)]
    return Peaks(most[0], most[1], kept)
