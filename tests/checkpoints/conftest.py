"""What several files about checkpoints begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints.tiny_models import qwen3_moe, save


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A tiny Qwen3-MoE, as transformers saves it."""
    return save(qwen3_moe(), tmp_path_factory.mktemp("source"))
