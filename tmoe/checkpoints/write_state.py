"""Which files of an output folder are finished, so that a killed run can be taken up again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..checks import expect
from ..formats import ErrorSums
from ..whole_file import UNFINISHED, whole_file
from .json_files import read_json
from .write_experts import Errors
from .written import OP

STATE = ".tmoe-quantize.json"


class State:
    """The file `STATE` of an output folder: what is being made from what, and what is done."""

    def __init__(self, out: Path, job: dict[str, str]) -> None:
        """Create the folder, or take up the work in it.

        Raises:
            ValueError: the folder holds something else: files of unknown origin, or the work of
                another scheme, format or source.
        """
        self.path, self.job = out / STATE, job
        self.finished: dict[str, Any] = {}
        found = sorted(file.name for file in out.iterdir()) if out.exists() else []
        if STATE in found:
            known = read_json(self.path)
            ours = {"job", "finished"} <= set(known)
            expect(ours, OP, str(self.path), "a state of tmoe quantize", list(known))
            differs = [key for key, value in job.items() if known["job"].get(key) != value]
            if differs:
                raise ValueError(
                    f"{OP}: out must be a new folder, or one begun with {_words(job, differs[0])}, "
                    f"got {out}, begun with {_words(known['job'], differs[0], 'another')}"
                )
            self.finished = known["finished"]
            for file in found:
                if file.startswith(".") and file.endswith(UNFINISHED):
                    (out / file).unlink()  # of a run that was killed
        elif found:
            raise ValueError(
                f"{OP}: out must be a new or empty folder, or one that tmoe quantize began, got "
                f"{out} with {', '.join(found[:8])}"
            )
        out.mkdir(parents=True, exist_ok=True)
        self._save()

    def is_finished(self, shard: str) -> bool:
        """Whether that file is there, whole, and of the size that was written."""
        path = self.path.with_name(shard)
        if shard not in self.finished or not path.is_file():
            return False
        return bool(path.stat().st_size == self.finished[shard]["bytes"])

    def finish(self, shard: str, tensors: dict[str, int], errors: Errors) -> None:
        """Remember a written file: its tensors with their bytes, and the errors made."""
        sums = {
            layer: {role: [error.signal, error.noise] for role, error in roles.items()}
            for layer, roles in errors.items()
        }
        size = self.path.with_name(shard).stat().st_size
        self.finished[shard] = {"bytes": size, "tensors": tensors, "errors": sums}
        self._save()

    def errors(self) -> Errors:
        """The errors of all finished files, by layer and role."""
        total: Errors = {}
        for shard in self.finished.values():
            for layer, roles in shard["errors"].items():
                sums = total.setdefault(layer, {})
                for role, (signal, noise) in roles.items():
                    sums[role] = sums.get(role, ErrorSums()) + ErrorSums(signal, noise)
        return total

    def _save(self) -> None:
        write_json(self.path, {"job": self.job, "finished": self.finished})


def _words(job: dict[str, str], key: str, article: str = "this") -> str:
    return f"{article} source" if key == "source" else f"{key} {job.get(key)}"


def write_json(path: Path, value: Any) -> None:
    """Write a file that is the old one or the new one, never half of it."""
    with whole_file(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def identity(files: list[Path]) -> str:
    """What the source is, by its files' names, sizes and times, without reading them."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()
