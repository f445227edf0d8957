"""Python in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python_path(*first: Path, root: Path = ROOT) -> str:
    """PYTHONPATH with which a process finds what is in `first`, this checkout, and whatever else
    PYTHONPATH has here: packages may be installed there."""
    paths = [*map(str, first), str(root), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))
