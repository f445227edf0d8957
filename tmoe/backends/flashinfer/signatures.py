"""What FlashInfer's MoE entry points take in each release, whether or not FlashInfer is installed.

`tools/record_flashinfer.py` made the data from FlashInfer's wheels and describes its layout.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from packaging.version import InvalidVersion, Version

from ...checks import expect

BELOW = (0, 8)  # FlashInfer has announced that 0.8 returns something else


class SourceText(str):
    """A default that isn't a literal: an enum's member, a dtype, the name of a sentinel."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def known_version(installed: str) -> Version | str:
    """The version that is installed, or why nothing is known about it."""
    try:
        version = Version(installed)
    except InvalidVersion:
        return f"FlashInfer's version can't be read: {installed}"
    if version.release >= BELOW:
        return f"knows FlashInfer below {'.'.join(map(str, BELOW))}, got {version}"
    return version


@cache
def recorded_versions() -> tuple[Version, ...]:
    """The releases whose wheels were read, oldest first."""
    return tuple(Version(release) for release in _record()["releases"])


@cache
def signature(version: Version, entry_point: str) -> inspect.Signature | None:
    """What `entry_point`, a function's name, takes in `version`.

    A version between two recorded ones has what the one below it has. None: `version` lacks the
    function, or is older than the first recorded one, or is 0.8 or newer. Defaults that aren't
    literals are `SourceText`. Raises ``ValueError`` if no recorded version has the function.
    """
    rows = _at(version, "signature", "signatures", "entry_point", entry_point)
    return None if rows is None else inspect.Signature([_parameter(*row) for row in rows])


@cache
def enum_members(version: Version, enum: str) -> Mapping[str, int]:
    """The members of an enum in `version` and their numbers; empty where `signature` is None.

    Raises ``ValueError`` if no recorded version has the enum.
    """
    return MappingProxyType(_at(version, "enum_members", "enums", "enum", enum) or {})


def binds(signature: inspect.Signature, keywords: Iterable[str]) -> str | None:
    """Why a call with exactly these keywords isn't possible, or None if it is."""
    given = tuple(keywords)
    parameters = signature.parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and (p.name not in given or p.kind is p.POSITIONAL_ONLY)
    ]
    unknown = [] if takes_all else [name for name in given if name not in named]
    complaints = [f"requires {', '.join(missing)}"] if missing else []
    complaints += [f"has no parameter {', '.join(unknown)}"] if unknown else []
    return "it " + " and ".join(complaints) if complaints else None


@cache
def _record() -> dict[str, Any]:
    file = resources.files("tmoe.backends.flashinfer").joinpath("signatures.json")
    return json.loads(file.read_text(encoding="utf-8"))


def _at(version: Version, op: str, table: str, arg: str, name: str) -> Any:
    """What the last change up to `version` left of a table's entry."""
    changes = _record()[table].get(name)
    expect(changes is not None, op, arg, "one that some recorded version has", repr(name))
    if version.release >= BELOW:
        return None
    found = None
    for release, value in changes.items():  # oldest first
        if Version(release) <= version:
            found = value
    return found


def _parameter(name: str, kind: str, *default: str) -> inspect.Parameter:
    kind = "POSITIONAL_OR_KEYWORD" if kind == "any" else kind.upper()
    value = _value(default[0]) if default else inspect.Parameter.empty
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=value)


def _value(source: str) -> object:
    try:
        return ast.literal_eval(source)
    except ValueError:
        return SourceText(source)
