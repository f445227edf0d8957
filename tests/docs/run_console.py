"""Run a page's commands. `tmoe` runs in this process; of a command in `NOT_STARTED` the words are
checked: options, modules, files, targets and extras that it names have to exist."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import Requirement
from setuptools.config.pyprojecttoml import load_file
from typer.testing import CliRunner

from tests.docs.blocks import ROOT, Block, agrees
from tests.docs.exceptions import NOT_STARTED
from tmoe.cli import app


def commands_of(block: Block) -> list[tuple[str, str]]:
    """The commands of a block, each with the output below it. A command begins with "$ " and goes
    on behind a backslash."""
    found: list[tuple[str, str]] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            while line.endswith("\\"):
                line = line[:-1].rstrip() + " " + next(lines).strip()
            found.append((line[2:], ""))
        elif found:
            found[-1] = found[-1][0], found[-1][1] + line + "\n"
        else:
            raise AssertionError(f'{block.where}: begin a command with "$ "')
    return found


def parts_of(command: str) -> list[list[str]]:
    """Its words, without a comment behind it and without variables before it; for each part of a
    chain."""
    words = shlex.split(command.replace(";", " ; "), comments=True)
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", ";"):
            parts.append([])
        elif parts[-1] or not re.fullmatch(r"[A-Z_]+=\S*", word):
            parts[-1].append(word)
    return parts


def not_started(words: list[str]) -> str | None:
    """The entry of `NOT_STARTED` for a command: its words, or the longest of its beginnings."""
    said = shlex.join(words)
    fitting = [
        key for key in NOT_STARTED if said == key or key[-1] == "…" and said.startswith(key[:-1])
    ]
    return max(fitting, key=len, default=None)


def run_console(block: Block) -> str:
    """Run or check the commands of a block, and return what they printed.

    Raises:
        AssertionError: a command fails, or prints something else than the page says.
    """
    printed = ""
    for command, said in commands_of(block):
        for words in parts_of(command):
            if not_started(words):
                check(block, words)
                assert not said.strip(), f"{block.where}: nothing compares the output of {command}"
                continue
            assert words[0] == "tmoe", (
                f"{block.where}: {command!r} has no entry in tests/docs/exceptions.py"
            )
            done = CliRunner().invoke(app, words[1:], env={"COLUMNS": "200"})
            assert done.exit_code == 0, f"{block.where}: {command}\n{done.output}{done.exception}"
            assert not said.strip() or agrees(said, done.stdout), f"{block.where}:\n{done.stdout}"
            printed += done.stdout
    return printed


def check(block: Block, words: list[str]) -> None:
    """That what a command names exists."""
    said = f"{block.where}: {shlex.join(words)}"
    if words[0] == "tmoe":
        _check_options(said, words[1:])
    elif "-m" in words:
        at = words.index("-m") + 1
        _check_module(said, words[at], words[at + 1 :])
    elif words[0] == "make":
        subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif words[:2] == ["pip", "install"]:
        _check_requirements(said, words[2:])
    elif words[0] == "pytest":
        _check_module(said, "pytest", words[1:])


def _check_options(said: str, words: list[str]) -> None:
    def silence(command: Any) -> Any:
        command.callback = None
        for inner in getattr(command, "commands", {}).values():
            silence(inner)
        return command

    out = io.StringIO()
    with contextlib.redirect_stderr(out), pytest.raises(SystemExit) as stopped:
        silence(typer.main.get_command(app)).main(args=words, prog_name="tmoe")
    assert not stopped.value.code, f"{said}\n{out.getvalue()}"


def _check_module(said: str, module: str, words: list[str]) -> None:
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, f"{said}: there is no module {module}"
    if module == "pytest":
        text = "".join(path.read_text() for path in (ROOT / "bench").glob("conftest.py"))
        text += "--benchmark-quiet --benchmark-json"
        assert all((ROOT / w).exists() for w in words if w.startswith("bench/")), said
    else:
        text = Path(found.origin).read_text() + (ROOT / "bench" / "script.py").read_text()
    if module == "tmoe.integrations.lm_eval":
        return  # all its options are lm_eval's
    for option in (w.partition("=")[0] for w in words if w.startswith("--")):
        assert f"{option}" in text, f"{said}: nothing in {module} says {option}"


def _check_requirements(said: str, words: list[str]) -> None:
    project = load_file(ROOT / "pyproject.toml")["project"]
    extras = set(project["optional-dependencies"])
    for word in (w for w in words if not w.startswith("-")):
        wanted = Requirement(
            word.replace(".[", "tmoe[", 1).replace("<this repository>", "file:///x")
        )
        if wanted.name == "tmoe":
            assert wanted.extras <= extras, f"{said}: extras are {sorted(extras)}"
