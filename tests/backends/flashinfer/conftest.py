"""A machine that has FlashInfer, as a fixture."""

from __future__ import annotations

from functools import partial

import pytest

from tests.backends.flashinfer.layers import machine


@pytest.fixture
def on(monkeypatch, tmp_path):
    """`machine`, with a cache folder of the test's own."""
    return partial(machine, monkeypatch, tmp_path)


@pytest.fixture
def b200(on):
    with on() as fake:
        yield fake
