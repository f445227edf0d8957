"""Checks of notebook 9."""

from __future__ import annotations

from itertools import permutations

import torch

from .judging import ask, ask_number, compare, compare_tensors, expect


def combine_rows(answer):
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 4, generator=random)
    rows[5] = float("nan")
    table = torch.tensor([[0, 3], [4, -1], [-1, -1], [2, 1]], dtype=torch.int32)
    wanted = torch.stack([rows[0] + rows[3], rows[4], torch.zeros(4), rows[2] + rows[1]])
    got = ask(answer, rows, table)
    if isinstance(got, torch.Tensor) and got.shape == wanted.shape:
        expect(
            not got.isnan().any(),
            "there is NaN in it. Index -1 is the last row, which nobody wrote; NaN · 0 is NaN. "
            "Select with torch.where or masked_fill instead of multiplying.",
        )
    first = rows.nan_to_num()[table.clamp(min=0).long()].sum(1)
    mistakes = {"Entries of -1 were read as row 0; they contribute nothing.": first}
    compare_tensors(got, wanted, "a table with -1", mistakes)


def spread(answer):
    for numbers in ([-0.6, 1.7, -1.2, -0.1, 0.5], [1e8, 1.0, -1e8], [1.0, 2.0, 3.0]):
        results = [_sum(order, torch.float32) for order in permutations(numbers)]
        in_64 = [_sum(order, torch.float64) for order in permutations(numbers)]
        mistakes = {
            "Python's own floats have 64 bits; use tensors of torch.float32.": max(in_64)
            - min(in_64),
            "That compares two orders; try all of them.": abs(results[0] - results[-1]),
        }
        wanted = max(results) - min(results)
        got = ask_number(answer, numbers)
        compare(got * 1e7, wanted * 1e7, f"{numbers}, in units of 1e-7", _times(mistakes, 1e7))


def _sum(numbers, dtype: torch.dtype) -> float:
    total = torch.zeros((), dtype=dtype)
    for number in numbers:
        total = total + torch.tensor(number, dtype=dtype)
    return total.item()


def _times(mistakes: dict[str, float], factor: float) -> dict[str, float]:
    return {hint: value * factor for hint, value in mistakes.items()}
