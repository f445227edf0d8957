"""The schemas of all ops, recorded with the version that was in their names.

    python -m tests.library.schemas

records today's; it refuses if they have changed and `OVERLOAD` in tmoe/library/define.py has not.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import tmoe  # noqa: F401  (defines the ops)
from tmoe.library.define import OVERLOAD

RECORD = Path(__file__).with_name("schemas.txt")


def schemas() -> list[str]:
    """Of every op in torch.ops.tmoe, sorted."""
    found = torch._C._jit_get_all_schemas()
    return sorted(str(schema) for schema in found if schema.name.startswith("tmoe::"))


def must_bump(recorded: list[str], now: list[str]) -> bool:
    """Whether schemas have changed under the version that they had before."""
    (then, before), (today, after) = _by_version(recorded), _by_version(now)
    return before != after and then == today


def _by_version(schemas: list[str]) -> tuple[set[str], list[str]]:
    """The versions in the names of ops (there should be one), and the schemas without them."""
    parts = [re.fullmatch(r"(\w+::\w+)(\.\w+)?(\(.*)", schema) for schema in schemas]
    found = [part.groups(default="") for part in parts if part is not None]
    return {version for _, version, _ in found}, [name + rest for name, _, rest in found]


if __name__ == "__main__":
    if RECORD.exists() and must_bump(RECORD.read_text().splitlines(), schemas()):
        sys.exit(f"schemas have changed: bump OVERLOAD in tmoe/library/define.py, {OVERLOAD!r}")
    RECORD.write_text("\n".join(schemas()) + "\n")
