"""Reading a checkpoint's JSON files, and putting lists of names into errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checks import expect
from .header import OP

CAP = 8  # names listed in an error


def read_json(path: Path) -> dict[str, Any]:
    """An object in JSON; an empty one where there is no such file."""
    if not path.exists() and not path.is_symlink():
        return {}
    if not path.exists():
        got = f"a link to {path.readlink()}, which isn't there"
        raise FileNotFoundError(f"{OP}: {path} must be a file in JSON, got {got}")
    try:
        value = json.loads(path.read_bytes().decode())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{OP}: {path.name} must be in JSON, got {error}") from error
    expect(isinstance(value, dict), OP, path.name, "an object in JSON", type(value).__name__)
    return value


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - CAP} more" if len(names) > CAP else ""
    return ", ".join(names[:CAP]) + more
