"""The demo that people start with torchrun: it says that the tokens are those of one rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tmoe.parallel import demo


def start(*arguments: str, ranks: int = 2) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


# The demo, and then whether a thread of the group is left.
SCRIPT = """
from pathlib import Path
from tmoe.parallel import demo
demo.main()
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
assert names and not any("gloo" in name for name in names), names
"""


def check(done: subprocess.CompletedProcess, exchange: str) -> None:
    assert done.returncode == 0, done.stderr
    for line in (
        "tmoe on 2 ranks, cpu, gloo, float32",
        "rank 0 holds experts 0, 1, 2, 3 of each of 4 layers",
        "rank 1 holds experts 4, 5, 6, 7 of each of 4 layers",
        f"-> {exchange:<16}  yes  about",
        "ok    each rank's 12 tokens are the same as on one rank",
    ):
        assert line in done.stdout, done.stdout
    assert "rank 1 writes:\ndef " in done.stdout


def test_two_ranks_write_what_one_writes():
    done = start("-m", "tmoe.parallel.demo", "--new-bytes", "12", "--exchange", "all_to_all")
    check(done, "all_to_all")


def test_so_they_do_with_the_other_exchange_and_no_thread_outlives_the_group(tmp_path):
    """Where something of tmoe's keeps the group, gloo's threads go on, and now and then one of them
    aborts Python's exit ("terminate called without an active exception")."""
    script = tmp_path / "demo.py"
    script.write_text(SCRIPT)
    check(start(str(script), "--new-bytes", "12", "--exchange", "all_gather"), "all_gather")


def test_it_says_how_it_is_started(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="^start it with: torchrun --nproc-per-node 2 -m tmoe"):
        demo.main([])
