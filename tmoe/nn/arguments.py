"""What the constructors of this folder check."""

from __future__ import annotations

import torch

from ..arguments import FLOATS
from ..checks import expect, expect_size, expect_type
from ..formats.scheme import Scheme


def expect_sizes(op: str, **sizes: int) -> None:
    """Raise unless each of `sizes` is an int of at least 1 and not too large."""
    for name, size in sizes.items():
        expect_size(size, op, name)


def expect_flags(op: str, **flags: bool) -> None:
    """Raise ``TypeError`` unless each of `flags` is a bool."""
    for name, flag in flags.items():
        expect_type(flag, bool, op, name)


def expect_parameter_dtype(op: str, dtype: torch.dtype | None) -> None:
    """Raise unless `dtype`, the default dtype where it is None, is one that experts compute in."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    expect_type(dtype, torch.dtype, op, "dtype")
    *names, got = (str(d).removeprefix("torch.") for d in (*FLOATS, dtype))
    expect(dtype in FLOATS, op, "dtype", f"one of {', '.join(names)}", got)


def expect_scheme_name(op: str, scheme: str | None) -> None:
    """Raise unless `scheme` is None, "bf16" or the name of one."""
    if scheme is not None:
        expect_type(scheme, str, op, "scheme")
        if scheme != "bf16":
            Scheme.of(scheme, op, or_bf16=True)
