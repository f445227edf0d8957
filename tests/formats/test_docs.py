"""docs/formats.md: its tables are the library's, its numbers are measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.formats.format_tables import TABLES
from tmoe.formats import FORMATS

TEXT = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()


@pytest.mark.parametrize("table", TABLES)
def test_the_tables_are_up_to_date(table):
    wanted = table()
    assert wanted in TEXT, f"paste this into docs/formats.md:\n\n{wanted}"


def test_every_format_has_a_section():
    headings = " ".join(re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE))
    assert not [name for name in FORMATS if f"`{name}`" not in headings]
