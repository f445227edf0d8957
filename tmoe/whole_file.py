"""Write a file so that it is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".tmp"  # how the name of what isn't whole yet ends; it begins with a dot


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """``with whole_file(path) as file: file.write(...)``

    The file has another name until the block ends and its bytes are on the disk. Then it takes the
    place of what was there in one step, so that a reader sees the old one or the new one. After an
    exception the old one stays, and nothing else; after a kill the unfinished one lies beside it.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)  # there only where something failed
