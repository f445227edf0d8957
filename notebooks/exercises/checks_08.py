"""Checks of notebook 8."""

from __future__ import annotations

import math

from .judging import ask, compare

VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def e2m1_code(answer):
    asked = (0.0, 0.25, 0.3, 0.75, 1.2, 1.75, 2.5, 2.6, 3.5, 4.9, 5.0, 5.1, 6.0, 100.0)
    for a in asked:
        distances = [abs(min(a, 6.0) - value) for value in VALUES]
        near = [code for code in range(8) if distances[code] == min(distances)]
        wanted = next((code for code in near if code % 2 == 0), near[0])
        mistakes = {
            "On a border the even code wins, not the upper one.": near[-1],
            "On a border the even code wins, not the lower one.": near[0],
            "Return the code, not its value.": VALUES[wanted],
            "Round to the nearest, not down.": max(c for c in range(8) if VALUES[c] <= a),
        }
        compare(ask(answer, a), wanted, f"a = {a}", mistakes)


def pack(answer):
    for codes in ([1, 10, 4, 6], [15, 0], [0, 15, 7, 8, 2, 3]):
        pairs = list(zip(codes[0::2], codes[1::2], strict=True))
        mistakes = {
            "The first code of a pair is the low half of the byte.": [a << 4 | b for a, b in pairs],
            "The second code is moved up by four bits: times 16.": [a + b for a, b in pairs],
            "Neighbours share a byte, not the first and the second half of the list.": [
                a | b << 4
                for a, b in zip(codes[: len(codes) // 2], codes[len(codes) // 2 :], strict=True)
            ],
        }
        compare(ask(answer, codes), [a | b << 4 for a, b in pairs], f"codes {codes}", mistakes)


def ceil_exponent(answer):
    for largest in (6.0, 6.1, 7.0, 3.0, 2.9, 100.0, 0.01, 96.0):
        wanted = math.ceil(math.log2(largest / 6))
        mistakes = {
            "That is the rule floor, under which this saturates.": math.floor(math.log2(largest))
            - 2,
            "The largest code is 6: divide by it first.": math.ceil(math.log2(largest)),
            "Where it fits exactly, the next power isn't needed.": math.floor(
                math.log2(largest / 6)
            )
            + 1,
        }
        compare(ask(answer, largest), wanted, f"largest magnitude {largest}", mistakes)
