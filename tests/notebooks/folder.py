"""What is in notebooks/: the exercises, and what a notebook shows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import nbformat
from nbformat import NotebookNode

from tools.write_notebooks import NOTEBOOKS, SOURCES, written

__all__ = ["NOTEBOOKS", "SOURCES", "committed", "exercises", "outputs"]


def exercises() -> list[tuple[str, str]]:
    """(number of the notebook, name) of each, in the order of the notebooks."""
    found = []
    for source in SOURCES:
        names = re.findall(r"^lesson\.check\((\w+)\)", source.read_text(), re.MULTILINE)
        found += [(source.name[:2], name) for name in names]
    return found


def committed(number: str) -> NotebookNode:
    """The notebook of this number as it is in the repository."""
    (source,) = (source for source in SOURCES if source.name[:2] == number)
    return nbformat.read(written(source), as_version=4)


def outputs(notebook: NotebookNode) -> Iterator[tuple[int, str, str | None]]:
    """(cell, text, picture as base64 or None) of everything that is shown."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = output.get("text", data.get("text/markdown", data.get("text/plain", "")))
            yield number, text, data.get("image/png")
