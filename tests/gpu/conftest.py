"""Keeps one test's damage from the next ones."""

from __future__ import annotations

import pytest
import torch

KEPT_BYTES = 40 * 2**30  # of memory that torch holds but nobody uses


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
