"""docs/parallel.md: its table is current."""

from __future__ import annotations

from tests.parallel.document import PAGE, written

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_is_current():
    """python -m tests.parallel.document"""
    assert written(TEXT) == TEXT and "| deepseek-v3 | bf16 | 1 |" in TEXT
