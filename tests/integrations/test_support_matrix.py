"""docs/support-matrix.md has every family, every column, and the transformers that was tested.

What a cell says is compared by the test that makes it (conftest.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from tests.integrations.families import BY_NAME
from tests.integrations.support_matrix import (
    COLUMNS,
    INTRO,
    PAGE,
    ROWS,
    SCHEME_COLUMNS,
    page,
    read_page,
)
from tests.integrations.wrappers import WRAPPERS
from tests.routing.case import PINNED
from tmoe.checkpoints.write_formats import METHODS, WRITTEN
from tmoe.formats import SCHEMES

pytestmark = pytest.mark.skipif(not PINNED, reason="the page is about the pinned transformers")


def test_the_page_has_every_family_and_column():
    cells = read_page()
    wanted = {(family, column) for family in BY_NAME for column in COLUMNS}
    assert wanted <= cells.keys(), "run `python -m tests.integrations.support_matrix`"
    assert {row for row, _ in cells} == set(ROWS)
    unwritten = {(s, m) for s in SCHEMES for m in METHODS} - {(s, m) for m, s in WRITTEN}
    assert {(s, c) for s in SCHEMES for c in SCHEME_COLUMNS} <= cells.keys()
    of_wrappers = {cell for cell in cells if cell[0] in {wrapper.name for wrapper in WRAPPERS}}
    assert {cell for cell in cells if not cells[cell]} - of_wrappers == unwritten
    assert PAGE.read_text().startswith(INTRO.format(version=transformers.__version__).rstrip())


def test_the_page_is_what_its_cells_make():
    """Written again from what it says, it is the same: nobody edited it by hand."""
    cells = {cell: said for cell, said in read_page().items() if said}
    assert page(cells) == PAGE.read_text()


def test_a_row_has_one_name():
    assert len(ROWS) == len(set(ROWS)) == len(BY_NAME) + len(WRAPPERS) + len(SCHEMES)


def test_the_page_names_the_tests():
    marked = {
        file.name
        for file in Path(__file__).parent.glob("test_*.py")
        if "pytest.mark.column" in file.read_text() and file != Path(__file__)
    }
    assert set(re.findall(r"`(test_\w+\.py)`", INTRO)) == marked
