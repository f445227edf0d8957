"""docs/planning.md: its Python runs on two ranks and prints what it says; tables are current."""

from __future__ import annotations

import re

from tests.parallel.ranks import printed, ranks
from tests.plan.document import PAGE, PARTS, written

TEXT = PAGE.read_text(encoding="utf-8")


def test_every_block_runs_and_prints_what_its_comments_say():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    comments = [
        comment
        for block in blocks
        for comment in re.findall(r"^ *print\(.*\)  # (.*)$", block, flags=re.MULTILINE)
    ]
    assert len(comments) == "".join(blocks).count("print(") >= 4
    wanted = [line for text in comments for line in ([text] if "(" in text else text.split(", "))]
    with ranks(2) as two:
        assert two.run(printed, blocks, PAGE.name) == [wanted, wanted]


def test_tables_are_current():
    """python -m tests.plan.document"""
    assert written(TEXT) == TEXT and all(
        f"<!-- {name} -->\n\n**" in TEXT for name in ("gain", "plan")
    )
    assert TEXT.count("<!-- end -->") == len(PARTS)
