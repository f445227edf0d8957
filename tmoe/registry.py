"""Backends by name. A backend is imported when it is first considered, never when tmoe is."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

_targets: dict[str, str] = {}


def register(name: str, target: str) -> None:
    """Make the class at `target` ("module:Class") known as backend `name`.

    Raises ``ValueError`` if that name stands for another class already.
    """
    if _targets.setdefault(name, target) != target:
        raise ValueError(f"register: backend {name!r} is already {_targets[name]}, got {target}")


def names() -> tuple[str, ...]:
    """The names of all backends, in order of registration."""
    return tuple(_targets)


@cache
def load(name: str) -> Any:
    """The one instance of backend `name`; ``ImportError`` where its libraries are missing."""
    module, _, attribute = _targets[name].partition(":")
    return getattr(import_module(module), attribute)()
