"""What was measured, kept between processes: a JSON file for each kind of machine.

A time is worth something only where it was measured, so a file is named after the GPU, its driver
and the versions of the libraries, and says so inside. For each problem it holds the times of all
candidates, not the winner alone:

    {"machine": {...}, "times": {
        "fused_experts(...)": {"triton": 0.041, "torch": 0.183},
        "fused_experts(...) by triton": {"plain, rows: table": 0.044, ...}}}

in milliseconds; the second entry is of one backend's settings (`tuned.py`). Reading never fails: a
file that is missing, truncated, of another machine or not ours is a miss. Writing merges under a
lock and replaces the file in one step, so that a reader sees the old one or the new one, and a
process that is killed leaves the old one; where nothing can be written, what was measured is kept
for this process, and one warning says why.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..whole_file import whole_file

Times = dict[str, dict[str, float]]  # problem -> candidate -> milliseconds

LOCK_SECONDS = 10.0  # that a writer waits for another one
LONGEST = 1e9  # milliseconds; more is no time, or no float


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """What a time depends on."""

    gpu: str
    driver: str | None
    torch: str
    triton: str | None
    flashinfer: str | None
    tmoe: str

    @property
    def file_name(self) -> str:
        """Readable, and different for every other machine."""
        words = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-") or "unknown"
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{words}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


class Store:
    """The times of one kind of machine: those of the file, and those that this process added."""

    def __init__(self, folder: Path, measured_on: MeasuredOn) -> None:
        """Nothing is read or made yet; `folder` is ``cache_dir() / "times"`` as a rule."""
        self.path = folder / measured_on.file_name
        self._measured_on = measured_on
        self.problem: str | None = None  # why the last `add` didn't reach the file
        self._added: Times = {}

    def read(self) -> Times:
        """All times, freshly read. Never raises."""
        return _merged(self._of_file(), self._added)

    def add(self, times: Mapping[str, Mapping[str, float]], *, whole: bool = False) -> bool:
        """Add times to those that are there, newer ones in place of older ones; if `whole`, these
        problems' old candidates go. Whether they will be there for other processes, too: if not, a
        warning said why once."""
        gone = tuple(times) if whole else ()
        self._added = _merged(_without(self._added, gone), times)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=LOCK_SECONDS):
                self._replace(_merged(_without(self._of_file(), gone), self._added))
        except (OSError, Timeout) as error:
            is_news = self.problem is None
            self.problem = str(getattr(error, "strerror", None) or error)
            if is_news:
                warnings.warn(
                    f"tmoe can't keep what it measured in {self.path}: {self.problem}", stacklevel=2
                )
            return False
        self.problem = None
        return True

    def _of_file(self) -> Times:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or content.get("machine") != asdict(self._measured_on):
            return {}
        return _usable(content.get("times"))

    def _replace(self, times: Times) -> None:
        content = {"machine": asdict(self._measured_on), "times": times}
        with whole_file(self.path) as file:
            file.write(json.dumps(content, indent=1, sort_keys=True).encode())


def _usable(times: Any) -> Times:
    """Positive numbers of a sensible size by candidate by problem; whatever else is left out."""
    if not isinstance(times, dict):
        return {}
    usable = {
        problem: {
            name: float(ms)
            for name, ms in candidates.items()
            if isinstance(ms, int | float) and not isinstance(ms, bool)
            and 0 < ms < LONGEST
        }
        for problem, candidates in times.items()
        if isinstance(candidates, dict)
    }  # fmt: skip
    return {problem: candidates for problem, candidates in usable.items() if candidates}


def _without(times: Times, problems: Collection[str]) -> Times:
    return {problem: known for problem, known in times.items() if problem not in problems}


def _merged(old: Times, new: Mapping[str, Mapping[str, float]]) -> Times:
    problems = {**old, **new}
    return {problem: {**old.get(problem, {}), **new.get(problem, {})} for problem in problems}
