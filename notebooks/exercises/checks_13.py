"""Checks of notebook 13."""

from __future__ import annotations

import math

from .judging import ask_number, compare


def bits(answer):
    for chances in ([0.5, 0.25, 1.0], [1 / 256] * 4, [0.9, 0.1]):
        nats = -sum(map(math.log, chances)) / len(chances)
        mistakes = {
            "Those are nats, with the natural logarithm. Bits go with log2.": nats,
            "Take the mean over the bytes, not the sum.": nats / math.log(2) * len(chances),
            "A chance below 1 has a negative logarithm: turn the sign round.": -nats / math.log(2),
            "The mean of the logarithms, not the logarithm of the mean.": -math.log2(
                sum(chances) / len(chances)
            ),
        }
        compare(ask_number(answer, chances), nats / math.log(2), f"chances {chances}", mistakes)


def specialisation(answer):
    cases = (
        (
            [[0, 1], [0, 2], [1, 2], [1, 3], [2, 3], [0, 3]],
            [True, True, False, False, False, True],
            0,
        ),
        ([[0], [1], [1], [2]], [True, True, False, False], 1),
    )
    for ids, is_kind, expert in cases:
        mine = [expert in chosen for chosen in ids]
        of_kind = [hit for hit, kind in zip(mine, is_kind, strict=True) if kind]
        among_all, among_kind = sum(mine) / len(mine), sum(of_kind) / len(of_kind)
        mistakes = {
            "Divide by the expert's share among all tokens.": among_kind,
            "That is upside down.": among_all / among_kind,
            "That is how many of the expert's tokens are of the kind.": sum(of_kind) / sum(mine),
        }
        case = f"ids {ids}, kind {is_kind}, expert {expert}"
        compare(ask_number(answer, ids, is_kind, expert), among_kind / among_all, case, mistakes)
