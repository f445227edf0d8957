"""Checks of notebook 12."""

from __future__ import annotations

from .judging import ask, ask_number, compare


def rows_to_send(answer):
    cases = (
        ([[0, 1], [1, 2], [3, 2]], [0, 0, 1, 1], 2),
        ([[0, 5], [4, 5], [2, 0], [1, 3]], [0, 0, 1, 1, 2, 2], 3),
    )
    for ids, rank_of, ranks in cases:
        slots = [sum(rank_of[e] == r for chosen in ids for e in chosen) for r in range(ranks)]
        wanted = [sum(any(rank_of[e] == r for e in chosen) for chosen in ids) for r in range(ranks)]
        first = [sum(rank_of[chosen[0]] == r for chosen in ids) for r in range(ranks)]
        mistakes = {
            "A token with two experts on a rank goes there once.": slots,
            "All of a token's experts count, not only the first.": first,
        }
        compare(ask(answer, ids, rank_of, ranks), wanted, f"{ids}, experts on {rank_of}", mistakes)


def local_ids(answer):
    for ids, first, count in (([5, 2, 8, 4, 7], 4, 4), ([0, 3, -1], 0, 3)):
        wanted = [e - first if first <= e < first + count else -1 for e in ids]
        mistakes = {
            "The rank's own experts begin with 0: take off first_expert.": [
                e if first <= e < first + count else -1 for e in ids
            ],
            "Ids behind the last local expert aren't here either.": [
                e - first if e >= first else -1 for e in ids
            ],
            "Ids of others are -1, whatever comes out of the subtraction.": [
                e - first for e in ids
            ],
        }
        case = f"{ids}, experts {first} to {first + count - 1}"
        compare(ask(answer, ids, first, count), wanted, case, mistakes)


def busiest(answer):
    for loads, ranks in (([10, 2, 3, 5], [[0, 1], [2, 3]]), ([12, 2, 3, 5], [[0, 1], [2, 3, 0]])):
        copies = [sum(e in held for held in ranks) for e in range(len(loads))]
        totals = [sum(loads[e] / copies[e] for e in held) for held in ranks]
        mistakes = {
            "An expert with copies gives each of them a part of its load.": max(
                sum(loads[e] for e in held) for held in ranks
            ),
            "That is the mean; everybody waits for the busiest.": sum(totals) / len(totals),
            "That is the busiest expert. A rank has the sum over its experts.": max(loads),
        }
        compare(
            ask_number(answer, loads, ranks), max(totals), f"loads {loads}, ranks {ranks}", mistakes
        )
