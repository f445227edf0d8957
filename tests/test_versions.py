"""The table of versions in docs/status.md: what it has to agree with, and this run's versions."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import triton
from packaging.requirements import Requirement
from packaging.version import Version

from tmoe.backends.triton_backend import OLDEST_TRITON
from tmoe.doctor import TRITON_OF_TORCH
from tmoe.kernels.launch import KNOWN_TRITONS

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (\d+\.\d+\.\d+) \| (\d+\.\d+\.\d+) \| (\d+\.\d+\.\d+) \|", re.MULTILINE)


def minor(version: str) -> str:
    return "{0.major}.{0.minor}".format(Version(version))


def pairs() -> list[tuple[str, str, str]]:
    """torch, Triton and transformers, a row of the table each."""
    return ROW.findall((ROOT / "docs" / "status.md").read_text())


def test_the_suite_has_run_with_what_runs_it():
    """With newer releases this fails, until somebody has looked at the rest of the suite there and
    written a row. CI runs the newest every week."""
    listed = [{minor(version) for version in column} for column in zip(*pairs(), strict=True)]
    here = minor(torch.__version__), minor(triton.__version__)
    assert here[0] in listed[0] and here[1] in listed[1], f"docs/status.md has no row of {here}"


def test_rows_are_pairs_that_were_built_for_each_other():
    assert pairs() == sorted(pairs(), key=lambda row: Version(row[0]))
    for torch_version, triton_version, _ in pairs():
        assert TRITON_OF_TORCH[minor(torch_version)] == minor(triton_version)


def test_what_ci_pins_has_a_row():
    text = (ROOT / "constraints.txt").read_text()
    names = ("torch", "triton", "transformers")
    pinned = [re.search(rf"^{name}==(\S+)", text, re.MULTILINE) for name in names]
    assert tuple(found[1] for found in pinned if found) in pairs()


def test_the_oldest_that_is_allowed_has_a_row():
    text = (ROOT / "pyproject.toml").read_text()
    wanted = [Requirement(found) for found in re.findall(r'"((?:torch|triton)[><=][^"]+)"', text)]
    assert [one.name for one in wanted] == ["torch", "triton"]
    for requirement, version in zip(wanted, pairs()[0], strict=False):
        assert str(requirement.specifier) == f">={minor(version)}"
    assert pairs()[0][1] == str(OLDEST_TRITON)


def test_what_depends_on_the_version_knows_those_and_no_others():
    """Replays and Gluon; `tmoe doctor` says what a newer one goes without."""
    assert list(KNOWN_TRITONS) == [minor(row[1]) for row in pairs()]
    assert set(TRITON_OF_TORCH.values()) == set(KNOWN_TRITONS)
