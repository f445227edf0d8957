"""Run a block of a page's Python, and compare what it prints with what the page says.

A comment behind a call of `print` is what that call prints: its lines joined by ", ", with … for
anything. Words about the call belong on a line of their own.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from typing import Any

from tests.docs.blocks import ROOT, Block, agrees


class Printed:
    """Stands in for `print` in a page, and remembers by the line of the call what was printed."""

    def __init__(self) -> None:
        self.by_line: dict[int, list[str]] = {}
        self.text = ""

    def __call__(self, *values: Any, **keywords: Any) -> None:
        out = io.StringIO()
        print(*values, **{"file": out, **keywords})
        line = sys._getframe(1).f_lineno
        self.by_line.setdefault(line, []).extend(out.getvalue().splitlines())
        self.text += out.getvalue()


def said_by_comments(block: Block) -> dict[tuple[int, int], str]:
    """First and last line of each call of `print` with a comment behind it, and the comment."""
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(block.text).readline)
        if token.type == tokenize.COMMENT
    }
    calls = [
        (node.lineno, node.end_lineno)
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    return {(first, last): comments[last] for first, last in calls if last in comments}


def run_block(block: Block, names: dict[str, Any], replaced: dict[str, str]) -> str:
    """Run it and return what it printed; traces and `inspect` find its lines in the page.

    Raises:
        AssertionError: it prints something else than it says.
    """
    source = block.text
    for old, new in replaced.items():
        source = source.replace(old, new)
    names["print"] = printed = Printed()
    code = "\n" * (block.line - 1) + source
    exec(compile(code, str(ROOT / block.page), "exec"), names)
    for (first, last), said in said_by_comments(block).items():
        lines = range(first + block.line - 1, last + block.line)
        found = ", ".join(word for line in lines for word in printed.by_line.get(line, []))
        assert agrees(said, found), (
            f"{block.page}:{lines[-1]} says it prints {said!r}, and it prints {found!r}. "
            "(A comment behind print() is what it prints; other words go on a line above.)"
        )
    return printed.text
