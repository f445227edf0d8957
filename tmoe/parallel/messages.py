"""Messages: a token with its routes as one row of bytes, so that it takes one collective.

    | x | scale | slots, int32 (K) | weights (K) |      each starts at a multiple of 32 bytes

The parts are read as views, without a copy. x are numbers, or codes with the scales of their
blocks, if tokens are quantised before they are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tmoe.kernels.exchange_ref import Parts

from ..formats import QuantizedTensor

PACKED_BYTES = 1 << 20  # all-gather: from here on another collective costs less than a copy
ALIGNED = 32  # bytes: a stride of 16 bf16 numbers, which Triton knows to load as vectors
ROW = 128  # bytes of which a row has a multiple


@dataclass(frozen=True, slots=True)
class Tokens:
    """Rows of tokens as plain tensors, and what makes the tensor of them that experts take.

    Attributes:
        x: (T, W), numbers or codes.
        scale: (T, C), of codes with scales of their own rows.
        made_of: the quantised tensor that they are parts of.
    """

    x: Tensor
    scale: Tensor | None = None
    made_of: QuantizedTensor | None = None

    @classmethod
    def of(cls, x: Tensor) -> Tokens:
        if not isinstance(x, QuantizedTensor):
            return cls(x)
        scale = x.scale
        if scale.ndim == 0:  # one for all, which all ranks know
            return cls(x.data, None, x)
        return cls(x.data, scale if scale.ndim == 2 else scale[:, None], x)

    def like(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """Other rows of the same kind, as one tensor."""
        q = self.made_of
        if q is None:
            return x
        if scale is None:
            scale = q.scale
        elif q.scale.ndim == 1:
            scale = scale[:, 0]
        shape = (x.shape[0], q.shape[1])
        return QuantizedTensor(x, scale, q.global_scale, q.format, q.block_shape, shape, q.dtype)

    @property
    def row_bytes(self) -> int:
        """Of one token."""
        scale = 0 if self.scale is None else self.scale.shape[1] * self.scale.itemsize
        return self.x.shape[1] * self.x.itemsize + scale


def row_bytes(parts: Parts) -> int:
    """What one message takes."""
    return -(-sum(_spaces(parts)) // ROW) * ROW


def routes_at(parts: Parts) -> int:
    """The byte of a message at which slots begin, and what comes after them."""
    return sum(_spaces(parts)[:2])


def views(message: Tensor, like: Parts) -> Parts:
    """message (N, bytes) uint8 -> its parts; `like` has their widths and dtypes."""
    found: list[Any] = []
    start = 0
    for part, space in zip(like, _spaces(like), strict=True):
        if part is None:
            found.append(None)
            continue
        width = part.shape[1] * part.itemsize
        found.append(message[:, start : start + width].view(part.dtype))
        start += space
    return Parts(*found)


def _spaces(parts: Parts) -> list[int]:
    """Bytes of each part, with those up to the next one."""
    return [
        0 if part is None else -(-part.shape[1] * part.itemsize // ALIGNED) * ALIGNED
        for part in parts
    ]


def as_bytes(part: Tensor) -> Tensor:
    """(T, W) -> its bytes, (T, W · size) uint8; a view where rows are dense."""
    if part.numel() == 0:  # whose strides may be anything
        return part.new_empty(part.shape[0], part.shape[1] * part.itemsize, dtype=torch.uint8)
    return part.contiguous().view(torch.uint8)


def packed(parts: Parts) -> Tensor:
    """(T, bytes) uint8: all messages of tokens, in their order. Between the parts nothing is
    written, and nothing read."""
    pieces = []
    for part, space in zip(parts, _spaces(parts), strict=True):
        if part is not None:
            piece = as_bytes(part)
            pieces += [piece, piece.new_empty(len(piece), space - piece.shape[1])]
    rest = row_bytes(parts) - sum(_spaces(parts))
    return torch.cat([*pieces, pieces[0].new_empty(len(pieces[0]), rest)], 1)


def send_rows(parts: Parts, send: Callable[[Tensor, str], Tensor]) -> Parts:
    """Parts, sent in as few collectives as pays, and with their gradients where they have some.
    `send` takes rows and a word for what they are."""
    parts = parts._replace(slots=parts.slots.to(torch.int32))
    x, scale, slots, weights = parts
    if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
        assert scale is None, "codes have no gradient"
        ids = send(slots.contiguous(), "ids")
        return Parts(send(x, "tokens"), None, ids, send(weights, "weights"))
    if x.nbytes <= PACKED_BYTES:
        return views(send(packed(parts), "tokens"), parts)
    routes = parts._replace(x=x[:, :0])
    got = views(send(packed(routes), "routes"), routes)
    plain = as_bytes(x) if x.itemsize == 1 else x  # not all send float8
    return got._replace(x=send(plain, "tokens").view(x.dtype))
