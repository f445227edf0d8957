"""docs/support-matrix.md has every family, every column, and the transformers that was tested.

What a cell says is compared by the test that makes it (conftest.py).
"""

from __future__ import annotations

import pytest
import transformers

from tests.integrations.families import BY_NAME
from tests.integrations.support_matrix import COLUMNS, INTRO, PAGE, ROWS, page, read_page
from tests.integrations.wrappers import WRAPPERS
from tests.routing.case import PINNED

pytestmark = pytest.mark.skipif(not PINNED, reason="the page is about the pinned transformers")


def test_the_page_has_every_family_and_column():
    cells = read_page()
    wanted = {(family, column) for family in BY_NAME for column in COLUMNS}
    assert wanted <= cells.keys(), "run `python -m tests.integrations.support_matrix`"
    assert {row for row, _ in cells} == set(ROWS)
    assert not [cell for cell in wanted if not cells[cell]], "a column without a test"
    assert PAGE.read_text().startswith(INTRO.format(version=transformers.__version__).rstrip())


def test_the_page_is_what_its_cells_make():
    """Written again from what it says, it is the same: nobody edited it by hand."""
    cells = {cell: said for cell, said in read_page().items() if said}
    assert page(cells) == PAGE.read_text()


def test_a_row_has_one_name():
    assert len(ROWS) == len(set(ROWS)) == len(BY_NAME) + len(WRAPPERS)
