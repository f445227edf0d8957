"""Two ranks of a GPU each, started once for the tests of a file; and one test's damage is kept from
the next ones."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.ranks import ranks

NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
KEPT_BYTES = 40 * 2**30  # of memory that torch holds but nobody uses


@pytest.fixture(scope="module")
def two():
    with ranks(2, device="cuda") as started:
        yield started


@pytest.fixture(autouse=True)
def settled(request):
    """Errors of a kernel show up later: wait for them here, so that the right test is blamed.

    After an illegal access nothing on the device works any more, so the session ends.
    """
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"{request.node.nodeid} broke the device: {error}", returncode=3)
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > KEPT_BYTES:
        torch.cuda.empty_cache()
