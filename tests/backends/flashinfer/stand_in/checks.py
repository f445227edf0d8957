"""Refusals, as the real launchers raise them, and what they let pass although it goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Misuse(BaseException):  # noqa: N818  it ends a test, as pytest.fail does
    """The real entry point would take this and answer wrongly, or not as tmoe may rely on.

    Not an `Exception`: falling back to another backend must not hide it.
    """


@dataclass(frozen=True, slots=True)
class Checks:
    """Of the arguments of one entry point."""

    op: str

    def refuse(
        self, ok: bool, arg: str, wanted: object, got: object, error: type = RuntimeError
    ) -> None:
        """What the real one raises, too."""
        if not ok:
            raise error(self._sentence(arg, wanted, got))

    def misuse(self, ok: bool, arg: str, wanted: object, got: object) -> None:
        """What only the stand-in raises."""
        if not ok:
            raise Misuse(self._sentence(arg, wanted, got))

    def absent(self, args: dict[str, Any], names: Sequence[str], but: Sequence[Any] = ()) -> None:
        """Arguments that tmoe has no use for: the stand-in doesn't imitate what they do."""
        for name in names:
            value = args.get(name)
            absent = value is None or value is False or any(value is other for other in but)
            self.misuse(absent, name, "left out: the stand-in doesn't know it", value)

    def number(self, args: dict[str, Any], name: str, *, least: int) -> int:
        """An int that isn't a bool."""
        value = args[name]
        self.refuse(
            isinstance(value, int) and not isinstance(value, bool), name, "an int", value, TypeError
        )
        self.refuse(value >= least, name, f"at least {least}", value)
        return int(value)

    def tensor(
        self,
        args: dict[str, Any],
        name: str,
        dtypes: torch.dtype | Sequence[torch.dtype],
        shape: Sequence[int],
        really: str = "",
    ) -> Tensor:
        """A contiguous tensor of one of these dtypes and of this shape. `really` names what of
        "dtype", "shape" and "contiguous" the real one looks at, too."""
        value = args[name]
        dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        self.refuse(isinstance(value, Tensor), name, "a tensor", value, TypeError)
        got = f"{value.dtype} {tuple(value.shape)}"
        wanted = f"{' or '.join(map(str, dtypes))} {tuple(shape)}"
        for what, ok in (
            ("dtype", value.dtype in dtypes),
            ("shape", tuple(value.shape) == tuple(shape)),
            ("contiguous", value.is_contiguous()),
        ):
            complain = self.refuse if what in really else self.misuse
            complain(ok, name, f"{wanted}, contiguous", f"{got} with strides {value.stride()}")
        return value

    def _sentence(self, arg: str, wanted: object, got: object) -> str:
        if isinstance(got, Tensor):
            got = f"{got.dtype} {tuple(got.shape)}"
        return f"{self.op}: {arg} must be {wanted}, got {got}"
