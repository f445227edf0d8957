"""Replays launch what the long way launches, and only where nothing else happens.

Without a GPU: Triton's own key of each kernel, and what its C launcher is called with, are compared
by `replay_checks.py`, in a process where kernels are launched and not interpreted. With one:
tests/gpu/test_replay.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.replay_checks import CHECKS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.replay_checks"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_without_a_gpu(name, found):
    assert found[name] == "", found[name]
