"""What a caller may ask of the dispatcher: one object, changed by a context manager."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import registry
from .checks import expect, expect_type

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class Changes(TypedDict, total=False):
        """The keywords of `options`, for type checkers and editors."""

        backend: str | None
        deterministic: bool
        batch_invariant: bool
        recompute: bool
        main_grad: bool
        verify: bool
        cache_dir: str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class Options:
    """The settings in force in this thread or task.

    Args:
        backend: the name of the one implementation to use; None lets the dispatcher choose.
        deterministic: the same bits in every run.
        batch_invariant: a token's result doesn't depend on the other tokens of the call. Triton's
            operations can do that, but for a dynamic scale of a whole matrix (fp8_tensor, nvfp4);
            PyTorch's and FlashInfer's only routing and quantising. What can't, refuses.
        recompute: training keeps no (S, 2I) tensor from forward to backward, which multiplies by
            gate_up_proj once more instead.
        main_grad: the kernels add a weight's gradient to its attribute `main_grad`, Megatron's
            buffer, mostly fp32, instead of returning it. Read in the forward; not compiled.
        verify: compare a closed-source backend with ours before its first use.
        cache_dir: where measured times are kept; None: ``TMOE_CACHE_DIR``, or the platform's place
            for caches.
    """

    backend: str | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    recompute: bool = False
    main_grad: bool = False
    verify: bool = True
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            expect_type(self.backend, str, "options", "backend")
            names = registry.names()
            expect(
                self.backend in names,
                "options",
                "backend",
                f"one of {', '.join(names)}",
                repr(self.backend),
            )
        for name in ("deterministic", "batch_invariant", "recompute", "main_grad", "verify"):
            expect_type(getattr(self, name), bool, "options", name)
        if self.cache_dir is not None:
            expect_type(self.cache_dir, (str, os.PathLike), "options", "cache_dir")
            object.__setattr__(self, "cache_dir", Path(self.cache_dir))


_current: ContextVar[Options] = ContextVar("tmoe_options")
_DEFAULT = Options()
_NAMES = tuple(field.name for field in fields(Options))


def current() -> Options:
    """The options in force here."""
    return _current.get(_DEFAULT)


@contextmanager
def options(**changes: Unpack[Changes]) -> Iterator[Options]:
    """Change options inside a ``with`` block; what isn't named keeps the value that it has outside.

    Local to the thread and to the asyncio task. Raises ``TypeError`` for an unknown option and
    ``ValueError`` for an unknown backend, both on entering the block.
    """
    for name in changes:
        if name not in _NAMES:
            raise TypeError(f"options: {name!r} is not an option; there are {', '.join(_NAMES)}")
    token = _current.set(replace(current(), **changes))  # type: ignore[arg-type]
    try:
        yield _current.get()
    finally:
        _current.reset(token)
