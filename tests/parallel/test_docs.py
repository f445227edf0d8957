"""docs/parallel.md: its Python runs on two ranks and prints what it says; the table is current."""

from __future__ import annotations

import re

from tests.parallel.document import PAGE, written
from tests.parallel.ranks import printed, ranks

TEXT = PAGE.read_text(encoding="utf-8")


def test_every_block_runs_and_prints_what_its_comments_say():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    wanted = [
        comment
        for block in blocks
        for comment in re.findall(r"^ *print\(.*\)  # (.*)$", block, flags=re.MULTILINE)
    ]
    assert len(wanted) == "".join(blocks).count("print(") >= 4
    with ranks(2) as two:
        assert two.run(printed, blocks, PAGE.name) == [wanted, wanted]


def test_the_table_is_current():
    """python -m tests.parallel.document"""
    assert written(TEXT) == TEXT and "| deepseek-v3 | bf16 | 1 |" in TEXT
