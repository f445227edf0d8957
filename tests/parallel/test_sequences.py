"""Whatever came before, a call gives what one rank gives: drawn at random, from fixed seeds."""

import pytest

from tests.parallel.ranks import ranks
from tests.parallel.sequence_ranks import EXCHANGES, STEPS, sequence

SEEDS = 10


@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_step_after_the_other(size):
    with ranks(size) as started:
        done = [step for seed in range(SEEDS) for step in started.run(sequence, seed)[0]]
    kinds = {tuple(step.split()[:2]) for step in done}
    assert {kind for kind, _ in kinds} == set(STEPS)
    assert {exchange for _, exchange in kinds} == {str(name) for name in EXCHANGES}
