"""The installed transformers, for the few classes that differ between its versions."""

from __future__ import annotations

import transformers
from packaging.version import Version

VERSION = Version(transformers.__version__)


def before(version: str) -> bool:
    """Whether the installed transformers is older than `version`."""
    return Version(version) > VERSION
