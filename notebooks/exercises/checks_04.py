"""Checks of notebook 4."""

from __future__ import annotations

from itertools import accumulate

from .judging import ask, ask_list, compare, expect


def exclusive_offsets(answer):
    for counts in ([3, 0, 4], [0, 0, 2, 1], [5]):
        total = list(accumulate(counts))
        mistakes = {
            "That is the inclusive sum. It has to begin with 0.": total,
            "The last number, where everything ends, is missing.": [0, *total[:-1]],
        }
        compare(ask(answer, counts), [0, *total], f"counts {counts}", mistakes)


def rows_of_slots(answer):
    cases = [([2, 0, 2, 3, 0, 2], 4), ([1, 1, 1], 2), ([3, 0, -1, 3, 0, 5], 4)]
    for experts, num_experts in cases:
        wanted = _rows(experts, num_experts)
        order = sorted(range(len(experts)), key=lambda slot: experts[slot])
        backwards = [_rows(experts[::-1], num_experts)[-1 - s] for s in range(len(experts))]
        mistakes = {
            "That is row_to_slot, which slot is in each row. Wanted is its inverse.": order,
            "Slots of one expert have to keep their order: the earlier one first.": backwards,
        }
        got = ask_list(answer, experts, num_experts)
        elsewhere = [slot for slot, row in enumerate(wanted) if row < 0]
        expect(
            all(got[slot] == -1 for slot in elsewhere if slot < len(got)),
            f"Slots whose expert isn't in 0 … {num_experts - 1} get -1: slots {elsewhere} here.",
        )
        compare(got, wanted, f"{experts}, E={num_experts}", mistakes)


def _rows(experts: list[int], num_experts: int) -> list[int]:
    rows = [-1] * len(experts)
    row = 0
    for e in range(num_experts):
        for slot, chosen in enumerate(experts):
            if chosen == e:
                rows[slot] = row
                row += 1
    return rows


def count_tiles(answer):
    for counts, block_m in (([3, 0, 4, 3], 2), ([1, 1, 1, 1], 16), ([32, 0], 16)):
        mistakes = {
            "A tile must not mix experts: round up for each expert.": -(-sum(counts) // block_m),
            "Round up: the last rows of an expert are a tile too.": sum(
                c // block_m for c in counts
            ),
            "An expert without rows has no tile.": sum(c // block_m + 1 for c in counts),
        }
        wanted = sum(-(-count // block_m) for count in counts)
        compare(
            ask(answer, counts, block_m), wanted, f"counts {counts}, block_m={block_m}", mistakes
        )
