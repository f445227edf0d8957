"""`fixed_tokens`: every rank brings the same number of tokens, so that nothing has to be asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ..checks import expect, expect_type


@dataclass(frozen=True, slots=True)
class Fixed:
    capacity: int | None


_fixed: ContextVar[Fixed | None] = ContextVar("tmoe_parallel_fixed", default=None)


@contextmanager
def fixed_tokens(capacity: int | None = None) -> Iterator[None]:
    """Inside, every rank brings the same number of tokens to a call, as a decoder that pads does.

    Then nothing has to be asked before tokens are sent, the host doesn't wait for the device, and a
    CUDA graph captures the call, after one call outside of it. Pad with ids of -1.

    `capacity`: of the all-to-all, rows for each rank; None: as many as there are tokens, with which
    none can be left out. With fewer, what doesn't fit contributes nothing and is counted:
    ``layer.experts.parallel.num_dropped()``.
    """
    if capacity is not None:
        expect_type(capacity, int, "fixed_tokens", "capacity")
        expect(capacity >= 1, "fixed_tokens", "capacity", "at least 1", capacity)
    token = _fixed.set(Fixed(capacity))
    try:
        yield
    finally:
        _fixed.reset(token)


def fixed_now() -> Fixed | None:
    """What is in force here."""
    return _fixed.get()
