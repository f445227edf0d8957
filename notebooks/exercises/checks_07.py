"""Checks of notebook 7."""

from __future__ import annotations

import torch

from .judging import ask, compare_tensors


def token_scales(answer):
    x = torch.tensor([[0.5, -7.0, 1.0], [0.0, 0.0, 0.0], [896.0, 2.0, 3.0]])
    wanted = torch.tensor([7 / 448, 1.0, 2.0])
    mistakes = {
        "Take magnitudes: -7 is larger than 1.": torch.tensor([1 / 448, 1.0, 2.0]),
        "A row of zeros gets the scale 1.": torch.tensor([7 / 448, 0.0, 2.0]),
        "That is one scale for all rows.": torch.full((3,), 2.0),
        "The scale is what numbers are divided by: max |x| / 448.": 1 / wanted,
    }
    compare_tensors(ask(answer, x), wanted, f"rows {x.tolist()}", mistakes)


def round_to_step(answer):
    for step in (1.0, 0.25, 8.0):
        x = torch.tensor([0.4, 0.5, 1.5, 2.5, -0.5, -1.7, 38.4]) * step
        wanted = (x / step).round() * step
        mistakes = {
            "In a tie the even multiple wins.": (x / step + 0.5).floor() * step,
            "Round to the nearest, not towards zero.": (x / step).trunc() * step,
            "The magic number is 1.5 · 2^23 *steps*.": x.round(),
        }
        numbers = [round(number, 4) for number in x.tolist()]
        compare_tensors(ask(answer, x, step), wanted, f"step {step} and {numbers}", mistakes)


def blockwise_product(answer):
    random = torch.Generator().manual_seed(0)
    T, N, D, block = 3, 4, 12, 4
    a, w = (torch.randint(-8, 9, (n, D), generator=random).float() for n in (T, N))
    a_scale, w_scale = (
        2.0 ** torch.randint(-3, 4, (n, D // block), generator=random) for n in (T, N)
    )
    wide_a, wide_w = (s.repeat_interleave(block, 1) for s in (a_scale, w_scale))
    wanted = (a * wide_a) @ (w * wide_w).T
    mistakes = {
        "w has scales too.": (a * wide_a) @ w.T,
        "Each block has scales of its own; those of the first block aren't good for all.": (a @ w.T)
        * a_scale[:, :1]
        * w_scale[:, :1].T,
        "The scales are missing.": a @ w.T,
    }
    got = ask(answer, a, a_scale, w, w_scale, block)
    compare_tensors(got, wanted, "3 rows, 4 columns, depth 12 in blocks of 4", mistakes)
