"""Checks of what a caller passed: one sentence with function, argument, wanted and got."""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 2**31 - 1  # of a size or an id: kernels count in 32 bits


def expect(ok: bool, op: str, arg: str, wanted: object, got: object) -> None:
    """Raise ``ValueError("op: arg must be wanted, got got")`` unless `ok`."""
    if not ok:
        raise ValueError(f"{op}: {arg} must be {wanted}, got {got}")


def expect_type(value: object, kind: type | tuple[type, ...], op: str, arg: str) -> None:
    """Raise ``TypeError`` unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise TypeError(f"{op}: {arg} must be a {names}, got {type(value).__name__}")


def expect_tensor(value: object, op: str, arg: str) -> None:
    """Raise ``TypeError`` unless `value` is a tensor with sizes and strides: none that is sparse or
    nested."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {arg} must be a Tensor, got {type(value).__name__}")
    if value.is_nested or value.layout != torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise TypeError(f"{op}: {arg} must be a strided tensor, got a {kind} one")


def expect_size(value: object, op: str, arg: str, least: int = 1) -> None:
    """Raise unless `value` is an int, no bool, from `least` to what kernels can count to."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{op}: {arg} must be an int, got {type(value).__name__}")
    expect(value >= least, op, arg, f"at least {least}", value)
    expect(value <= MOST, op, arg, f"at most {MOST}", value)
