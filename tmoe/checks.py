"""Checks of what a caller passed: one sentence with function, argument, wanted and got."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def expect(ok: bool, op: str, arg: str, wanted: object, got: object) -> None:
    """Raise ``ValueError("op: arg must be wanted, got got")`` unless `ok`."""
    if not ok:
        raise ValueError(f"{op}: {arg} must be {wanted}, got {got}")


def expect_type(value: object, kind: type | tuple[type, ...], op: str, arg: str) -> None:
    """Raise ``TypeError`` unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise TypeError(f"{op}: {arg} must be a {names}, got {type(value).__name__}")


def expect_tensor(
    value: object,
    op: str,
    arg: str,
    *,
    shape: tuple[int | None, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Check that `value` is a tensor of `shape` (None = any size), one of `dtypes`, on `device`."""
    expect_type(value, Tensor, op, arg)
    assert isinstance(value, Tensor)
    if shape is not None:
        ok = value.ndim == len(shape) and all(
            want is None or want == got for want, got in zip(shape, value.shape, strict=False)
        )
        wanted = "(" + ", ".join("any" if s is None else str(s) for s in shape) + ")"
        expect(ok, op, arg, f"of shape {wanted}", tuple(value.shape))
    if dtypes is not None and value.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{op}: {arg} must have dtype {wanted}, got {value.dtype}")
    if device is not None:
        expect(value.device == device, op, arg, f"on {device}", value.device)
