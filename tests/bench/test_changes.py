"""Which difference between two files counts."""

from __future__ import annotations

import pytest

from tests.bench.results import layer, results
from tmoe.bench.changes import LEAST, changes, changes_table


def compared(before, after):
    """One cell, given as (µs, spread)."""
    files = (results(layer("olmoe", 1, "triton", us, spread=s)) for us, s in (before, after))
    (cell,) = changes(*files).cells
    return cell


@pytest.mark.parametrize(
    "before, after, real",
    [
        ((100, 0.0), (101.9, 0.0), False),  # less than LEAST
        ((100, 0.0), (102.1, 0.0), True),
        ((100, 0.03), (106, 0.02), True),  # 6 % against 3 + 2
        ((100, 0.03), (104, 0.02), False),
        ((106, 0.03), (100, 0.02), True),  # the same the other way round
        ((104, 0.03), (100, 0.02), False),
    ],
)
def test_a_change_exceeds_both_spreads(before, after, real):
    cell = compared(before, after)
    assert cell.is_real == real
    assert cell.ratio == pytest.approx(after[0] / before[0])
    assert cell.noise == pytest.approx(max(LEAST, before[1] + after[1]))


def test_slowest_first_and_what_is_only_in_one():
    before = results(
        *(layer("olmoe", T, "triton", 100.0) for T in (1, 2, 3)), layer("olmoe", 9, "triton", 1.0)
    )
    after = results(
        layer("olmoe", 1, "triton", 50.0),
        layer("olmoe", 2, "triton", 150.0),
        layer("olmoe", 3, "triton", 100.0),
        layer("olmoe", 3, "torch", 100.0),
    )
    found = changes(before, after)
    assert [cell.ratio for cell in found.cells] == [1.5, 1.0, 0.5] and len(found.real) == 2
    assert found.only_before == ("layer olmoe T=9",) and found.only_after == ("layer olmoe T=3",)
    assert [len(found.slower_than(percent)) for percent in (0, 49, 51)] == [1, 1, 0]
    assert found.mean_ratio == pytest.approx(0.75 ** (1 / 3))
    shown = changes_table(found)
    assert [row.texts[-1] for row in shown.rows] == ["slower", "faster"]
    assert [row.marked for row in shown.rows] == [True, False]
    everything = changes_table(found, everything=True)
    assert [row.texts[-1] for row in everything.rows] == ["slower", "same", "faster"]


def test_other_conditions_are_said():
    before, after = results(clocks=(746.0, 750.0)), results(clocks=(807.0, 806.0))
    after["machine_info"]["versions"]["torch"] = "2.13.0"
    after["machine_info"]["driver"] = None
    driver, torch, clock = changes(before, after).remarks
    assert driver == "driver: 580.1 before, None after"
    assert torch == "torch: 2.11.0 before, 2.13.0 after"
    assert clock.startswith("torch's matmul ran at 746 TFLOP/s before and at 806 after")
    assert changes(before, before).remarks == ()
