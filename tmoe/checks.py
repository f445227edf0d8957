"""Checks of what a caller passed: one sentence with function, argument, wanted and got."""

from __future__ import annotations


def expect(ok: bool, op: str, arg: str, wanted: object, got: object) -> None:
    """Raise ``ValueError("op: arg must be wanted, got got")`` unless `ok`."""
    if not ok:
        raise ValueError(f"{op}: {arg} must be {wanted}, got {got}")


def expect_type(value: object, kind: type | tuple[type, ...], op: str, arg: str) -> None:
    """Raise ``TypeError`` unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise TypeError(f"{op}: {arg} must be a {names}, got {type(value).__name__}")
