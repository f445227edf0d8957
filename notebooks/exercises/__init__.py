"""The checks of the exercises: a function for each, of the exercise's own name.

A check tries the learner's function and raises `Wrong` with a sentence that helps. Read one only
after you have tried; the solutions are in the folder beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from .judging import Wrong

MODULES = sorted(path.stem for path in Path(__file__).parent.glob("checks_*.py"))


def problem_with(name: str, answer: Callable[..., Any]) -> str | None:
    """None if the answer is right; otherwise what is wrong with it, as a sentence or two."""
    try:
        _check_of(name)(answer)
    except Wrong as wrong:
        return str(wrong)
    return None


def _check_of(name: str) -> Callable[[Any], None]:
    for module in MODULES:
        found = getattr(import_module(f"exercises.{module}"), name, None)
        if found is not None:
            return found
    raise ValueError(f"check: no exercise is called {name}; keep the name of the stub")
