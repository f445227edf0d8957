"""What tmoe finds around it: its environment variables, all of them, and installed packages.

TMOE_CACHE_DIR    folder for what stays between runs; the platform's place for caches if unset
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Where files stay between runs. It need not exist, or be writable."""
    return Path(os.environ.get("TMOE_CACHE_DIR") or platformdirs.user_cache_dir("tmoe"))


def nvidia_driver() -> str | None:
    """The version of NVIDIA's driver, or None where there is none, or not on Linux."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\d{3}\.\d+(\.\d+)?", text)
    return None if found is None else found[0]


@cache
def kernels_hash() -> str:
    """Changes with the kernels' sources, which in a checkout the version doesn't."""
    spec = find_spec("tmoe.kernels")
    assert spec is not None and spec.submodule_search_locations is not None
    files = sorted(Path(next(iter(spec.submodule_search_locations))).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def installed_version(distribution: str) -> str | None:
    """The version of an installed package, by the name that pip knows; None: not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
