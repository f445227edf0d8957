"""Every check takes its solution, and says something helpful to the stub and to wrong answers."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import lesson
from exercises import problem_with
from tests.notebooks.folder import committed, exercises, outputs
from tests.notebooks.right_answers import RIGHT
from tests.notebooks.wrong_answers import WRONG

EXERCISES = exercises()
NAMES = [name for _, name in EXERCISES]


@pytest.mark.parametrize("number, name", EXERCISES, ids=NAMES)
def test_the_solution_is_right(number, name):
    solution = getattr(importlib.import_module(f"solutions.solutions_{number}"), name)
    assert problem_with(name, solution) is None


@pytest.mark.parametrize("name", NAMES)
def test_another_way_is_right_too(name):
    """Other types of results, other dtypes, other sums; and it may change what it is given."""
    assert problem_with(name, RIGHT[name]) is None


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


def _stops(*arguments):
    return [][len(arguments)]


STRANGE = {
    "nothing": (lambda *_: None, "it returns nothing yet"),
    "an error": (_stops, "in the line `return [][len(arguments)]` with IndexError: list index"),
    "too few arguments": (lambda: 1, "takes 0 positional arguments"),
    "text": (lambda *_: "three", ""),
    "an empty list": (lambda *_: [], ""),
    "a class": (lambda *_: object, ""),
    "a tensor": (lambda *_: torch.zeros(99, dtype=torch.int8), ""),
    "an array": (lambda *_: np.zeros((2, 3), np.float16), ""),
    "a dictionary": (lambda *_: {"y": 1}, ""),
}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "scale_kernel"])
@pytest.mark.parametrize("answer, words", STRANGE.values(), ids=STRANGE)
def test_whatever_an_answer_does_it_gets_a_sentence(name, answer, words):
    said = problem_with(name, answer)
    assert said is not None and words in said and "\n" not in said and len(said) < 500, said


def test_what_is_wrong_with_a_kernel():
    @triton.jit
    def misspelt(out_ptr, x_ptr, n, factor, BLOCK: tl.constexpr):
        tl.store(out_ptr + places, factor)  # noqa: F821

    assert "keep the line @triton.jit" in problem_with("scale_kernel", lambda *_: None)
    assert "NameError: name 'places' is not defined" in problem_with("scale_kernel", misspelt)


def test_names_are_unique_and_all_have_answers():
    assert len(set(NAMES)) == len(NAMES)
    assert sorted(WRONG) == sorted(RIGHT) == sorted(NAMES)


def test_the_result_instead_of_the_function_is_explained():
    with pytest.raises(TypeError, match="takes the function itself, as in check.answer., got 3"):
        lesson.check(3)


def test_an_unknown_name_is_explained():
    with pytest.raises(ValueError, match="no exercise is called unheard_of"):
        problem_with("unheard_of", lambda: 1)
