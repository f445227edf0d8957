"""The environment variables that tmoe reads, all of them.

TMOE_CACHE_DIR    folder for what stays between runs; the platform's place for caches if unset
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Where files stay between runs. It need not exist, or be writable."""
    return Path(os.environ.get("TMOE_CACHE_DIR") or platformdirs.user_cache_dir("tmoe"))
