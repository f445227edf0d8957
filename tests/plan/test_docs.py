"""docs/planning.md: its tables are current."""

from __future__ import annotations

from tests.plan.document import PAGE, PARTS, written

TEXT = PAGE.read_text(encoding="utf-8")


def test_tables_are_current():
    """python -m tests.plan.document"""
    assert written(TEXT) == TEXT and all(
        f"<!-- {name} -->\n\n**" in TEXT for name in ("gain", "plan")
    )
    assert TEXT.count("<!-- end -->") == len(PARTS)
