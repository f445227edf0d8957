"""A store of times for one test, and what a run did with it."""

from __future__ import annotations

import pytest

from tmoe.dispatch import measure
from tmoe.kernels.grouped_gemm import grouped_gemm


def forget():
    """As if this process had just started."""
    measure._times.cache_clear()
    measure._store.cache_clear()
    for hear in measure._listeners:
        hear()


@pytest.fixture
def empty_store(monkeypatch, tmp_path):
    """A cache folder of this test's own, and nothing remembered from another."""
    monkeypatch.setenv("TMOE_CACHE_DIR", str(tmp_path))
    forget()
    yield tmp_path
    forget()


@pytest.fixture
def launched(monkeypatch):
    """The tiles of every grouped GEMM that is launched, in order."""
    tiles = []

    def spy(out, a, w, order, tile, **more):
        tiles.append(tile)
        return grouped_gemm(out, a, w, order, tile, **more)

    for module in ("triton_backend", "triton_quantized"):
        monkeypatch.setattr(f"tmoe.backends.{module}.grouped_gemm", spy)
    return tiles
