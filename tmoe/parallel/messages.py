"""Messages: a token with its routes as one row of bytes, so that a few tokens take one collective.

    | ids, int32 (K) | weights (K) | x (H) |      each starts at a multiple of 32 bytes

They are read as views, without a copy. Many tokens go without being packed: copying them would take
longer than another collective.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PACKED_BYTES = 1 << 20  # of x; from here on a collective of its own costs less than the copy
ALIGNED = 32  # bytes: a stride of 16 bf16 numbers, which Triton knows to load as vectors


def pack(ids: Tensor, weights: Tensor, x: Tensor | None = None) -> Tensor:
    """(T, bytes) uint8."""
    parts = []
    for tensor in (ids.to(torch.int32), weights, x):
        if tensor is not None:
            part = tensor.contiguous().view(torch.uint8)
            parts += [part, part.new_zeros(len(part), -part.shape[1] % ALIGNED)]
    return torch.cat(parts, 1)


def unpack(message: Tensor, ids: Tensor, weights: Tensor, x: Tensor | None = None) -> list[Tensor]:
    """The parts of a message's rows, as views; those given say what was packed."""
    found, start = [], 0
    for tensor, dtype in ((ids, torch.int32), (weights, weights.dtype), (x, None)):
        if tensor is not None:
            width = tensor.shape[1] * (dtype or tensor.dtype).itemsize
            found.append(message[:, start : start + width].view(dtype or tensor.dtype))
            start += -(-width // ALIGNED) * ALIGNED
    return found


def send_rows(
    x: Tensor, weights: Tensor, ids: Tensor, send: Callable[[Tensor, str], Tensor]
) -> list[Tensor]:
    """x (T, H), weights and ids (T, K), sent in as few collectives as pays, and with their
    gradients where they have some. `send` takes rows and a word for what they are."""
    if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
        parts = (x, "tokens"), (weights, "weights"), (ids.contiguous(), "ids")
        return [send(part, what) for part, what in parts]
    if x.nbytes <= PACKED_BYTES:
        ids, weights, x = unpack(send(pack(ids, weights, x), "tokens"), ids, weights, x)
        return [x, weights, ids]
    routes = send(pack(ids, weights), "routes")
    x = send(x, "tokens")
    return [x, *reversed(unpack(routes, ids, weights))]
