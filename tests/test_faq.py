"""docs/faq.md: every answer names tests, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
QUESTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))


@cache
def names_in(file: str) -> frozenset[str]:
    nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_held_by_tests_that_exist(question):
    file, found = "", 0
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", QUESTIONS[question]):
        file = path or file
        assert name in names_in(file), f"{file} has no {name}"
        found += 1
    assert found, "no test holds this answer"


def test_questions_are_found():
    assert len(QUESTIONS) == TEXT.count("\n### ") > 30
