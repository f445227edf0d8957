"""Every check takes its solution, and says something helpful to the stub and to wrong answers."""

from __future__ import annotations

import importlib

import pytest

from exercises import problem_with
from tests.notebooks.folder import committed, exercises, outputs
from tests.notebooks.wrong_answers import WRONG

EXERCISES = exercises()
NAMES = [name for _, name in EXERCISES]


@pytest.mark.parametrize("number, name", EXERCISES, ids=NAMES)
def test_the_solution_is_right(number, name):
    solution = getattr(importlib.import_module(f"solutions.solutions_{number}"), name)
    assert problem_with(name, solution) is None


@pytest.mark.parametrize("number, name", EXERCISES, ids=NAMES)
def test_the_stub_is_told_what_to_do(number, name):
    (said,) = (text for _, text, _ in outputs(committed(number)) if f" {name}: " in text)
    assert said.startswith("✗ ") and " nothing yet. Put your code" in said


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_answer_is_told_why(name):
    """Of each pair: an answer, and a word that only a hint to this mistake has."""
    assert len(WRONG[name]) >= 2
    for answer, word in WRONG[name]:
        said = problem_with(name, answer)
        assert said is not None and word in said, said


def test_names_are_unique_and_all_have_wrong_answers():
    assert len(set(NAMES)) == len(NAMES) and sorted(WRONG) == sorted(NAMES)


def test_an_unknown_name_is_explained():
    with pytest.raises(ValueError, match="no exercise is called unheard_of"):
        problem_with("unheard_of", lambda: 1)
