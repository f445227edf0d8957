"""Checks of notebook 10."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from .judging import UNFINISHED, Wrong, ask, compare, expect, run, stopped, text


def why_not(answer):
    bad = SimpleNamespace(dtype=torch.float32, hidden=256)
    said = run(answer, bad)
    if said is None or said is Ellipsis:
        narrow = run(answer, SimpleNamespace(dtype=torch.bfloat16, hidden=100))
        if narrow is None or narrow is Ellipsis:
            raise Wrong(UNFINISHED)
        raise Wrong("it says yes to float32; it multiplies bf16 and fp16 only.")
    for dtype in (torch.bfloat16, torch.float16):
        said = run(answer, SimpleNamespace(dtype=dtype, hidden=2048))
        expect(
            said is None,
            f"it should return None for {dtype} and hidden 2048, but returns {text(said)}.",
        )
    for problem, value in (
        (bad, "float32"),
        (SimpleNamespace(dtype=torch.bfloat16, hidden=2880), "2880"),
        (SimpleNamespace(dtype=torch.float16, hidden=64), "64"),
    ):
        said = run(answer, problem)
        case = f"dtype {problem.dtype}, hidden {problem.hidden}"
        expect(said is not None, f"it says yes to {case}; 128 has to divide the hidden size.")
        expect(
            isinstance(said, str), f"for {case} it should be a sentence, but it is {text(said)}."
        )
        expect(
            value in said,
            f"for {case} it says {said!r}. Name what came, {value}, so one sees what to change.",
        )


def choose(answer):
    got = ask(answer, [("fast", "needs a GPU"), ("slow", None), ("slower", None)])
    mistakes = {
        "The first one that can is preferred, not the last.": "slower",
        "That one has a reason why it can't.": "fast",
    }
    compare(got, "slow", "fast can't, slow and slower can", mistakes)
    try:
        got = answer([("fast", "needs a GPU"), ("narrow", "takes 16 columns, got 20")])
    except RuntimeError as error:
        for word in ("fast", "needs a GPU", "narrow", "takes 16 columns, got 20"):
            expect(word in str(error), f"when nobody can, the error should have {word!r} in it.")
    except Exception as error:  # whatever may be wrong with the answer
        raise Wrong(
            f"when nobody can, it should raise a RuntimeError, but {stopped(answer, error)}"
        ) from error
    else:
        raise Wrong(f"when nobody can, it should raise a RuntimeError, but it returns {text(got)}.")
