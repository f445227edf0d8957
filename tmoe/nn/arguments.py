"""What the constructors of this folder check."""

from __future__ import annotations

import torch

from ..arguments import FLOATS
from ..checks import expect, expect_type


def expect_sizes(op: str, **sizes: int) -> None:
    """Raise unless each of `sizes` is an int of at least 1."""
    for name, size in sizes.items():
        expect_type(size, int, op, name)
        expect(size >= 1, op, name, "at least 1", size)


def expect_parameter_dtype(op: str, dtype: torch.dtype | None) -> None:
    """Raise unless `dtype`, the default dtype where it is None, is one that experts compute in."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    expect_type(dtype, torch.dtype, op, "dtype")
    *names, got = (str(d).removeprefix("torch.") for d in (*FLOATS, dtype))
    expect(dtype in FLOATS, op, "dtype", f"one of {', '.join(names)}", got)
