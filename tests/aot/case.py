"""One thing to compile."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from tests.aot.targets import EVERY_GPU


@dataclass(frozen=True)
class Case:
    name: str
    launch: Callable[[], object]
    max_spilled: int = 64  # bytes per thread: a few registers, outside the inner loop
    gpus: Collection[str] = EVERY_GPU  # names of the targets that it is compiled for
