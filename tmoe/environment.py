"""What tmoe finds around it: its environment variables, all of them, and installed packages.

TMOE_CACHE_DIR    folder for what stays between runs; the platform's place for caches if unset
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Where files stay between runs. It need not exist, or be writable."""
    return Path(os.environ.get("TMOE_CACHE_DIR") or platformdirs.user_cache_dir("tmoe"))


def installed_version(distribution: str) -> str | None:
    """The version of an installed package, by the name that pip knows; None: not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
