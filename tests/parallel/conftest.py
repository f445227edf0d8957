"""Groups of ranks on CPUs, started once for the tests of a file."""

import pytest

from tests.parallel.ranks import ranks


@pytest.fixture(scope="module")
def two():
    with ranks(2) as started:
        yield started


@pytest.fixture(scope="module")
def three():
    with ranks(3) as started:
        yield started


@pytest.fixture(scope="module")
def four():
    with ranks(4) as started:
        yield started
