"""docs/reference has every public name, its docstrings can be read, its command line is current."""

from __future__ import annotations

import ast
import importlib
import logging
import re
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from tools.write_cli_reference import PAGE, written

griffe = pytest.importorskip("griffe")  # not on Python 3.10

PUBLIC = (
    "tmoe", "tmoe.nn", "tmoe.routing", "tmoe.formats", "tmoe.lora", "tmoe.parallel", "tmoe.plan",
    "tmoe.integrations.transformers", "tmoe.checkpoints",
)  # fmt: skip
FOLDER = ROOT / "docs" / "reference"
_DIRECTIVE = re.compile(r"^::: (\S+)(?:\n    options: \{ heading: (\S+) \})?$", re.M)
# What a reader sees, and where it is defined. In a checkout tmoe.kernels is the folder kernels.
SHOWN = {
    heading or path: f"tmoe.{path}" if path.startswith("kernels.") else path
    for page in sorted(FOLDER.glob("*.md"))
    for path, heading in _DIRECTIVE.findall(page.read_text(encoding="utf-8"))
}


def _object(path: str) -> Any:
    """What is at a dotted path; of a module and a function of one name, the function."""
    module, rest = path, []
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for name in rest:
        found = getattr(found, name)
    if isinstance(found, ModuleType) and path != "tmoe":
        parent, _, name = path.rpartition(".")
        found = getattr(importlib.import_module(parent), name, found)
    return found


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module):
    """Under its own path, or as the name that another module has for it."""
    objects = [_object(name) for name in SHOWN]
    for name in importlib.import_module(module).__all__:
        value = getattr(importlib.import_module(module), name)
        if isinstance(value, ModuleType):
            continue
        assert any(value is shown for shown in objects), f"{module}.{name} is on no page"


def test_every_launcher_is_in_the_reference():
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name[0] != "_" and _launches(node):
                assert f"tmoe.kernels.{path.stem}.{node.name}" in SHOWN


def _launches(node: ast.FunctionDef) -> bool:
    calls = [ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)]
    return "launch" in calls


@pytest.mark.parametrize("name", SHOWN)
def test_a_heading_is_the_name_of_what_is_shown(name):
    assert _object(name) is _object(SHOWN[name])


@pytest.fixture(scope="module")
def sources():
    """The sources as mkdocstrings reads them, without importing anything."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser="google")
    loader.load("tmoe")
    loader.resolve_aliases(implicit=True)
    loader.load("kernels")
    return loader.modules_collection


def _shown_objects(sources, name):
    kernel = name.startswith("tmoe.kernels.")
    found = sources[SHOWN[name].removeprefix("tmoe.") if kernel else SHOWN[name]]
    found = found.final_target if found.is_alias else found
    members = [m for m in found.members.values() if m.name[0] != "_" and not m.is_alias]
    return [found, *(m for m in members if m.is_function and found.is_class)]


@pytest.mark.parametrize("name", SHOWN)
def test_a_docstring_reads(name, sources, caplog):
    """It is there, its sections are understood, and they name parameters that there are."""
    shown, *methods = _shown_objects(sources, name)
    if not shown.is_attribute:
        assert shown.docstring is not None, f"{name} has no docstring"
    for found in (shown, *methods):
        if found.docstring is None:
            continue
        with caplog.at_level(logging.WARNING):
            sections = found.docstring.parse("google")
        given = found.parameters if found.is_function or found.is_class else []
        parameters = {parameter.name.lstrip("*") for parameter in given}
        for section in sections:
            if section.kind is griffe.DocstringSectionKind.parameters:
                named = [n.lstrip("*") for p in section.value for n in p.name.split(", ")]
                assert not set(named) - parameters, f"{found.path}: {set(named) - parameters}"
            if section.kind is griffe.DocstringSectionKind.raises:
                raised = [
                    n for r in section.value for n in str(r.annotation).strip("()").split(", ")
                ]
                assert all(n.endswith("Error") for n in raised), f"{found.path}: {raised}"
            if section.kind is griffe.DocstringSectionKind.text:
                assert not re.search(
                    r"^(Args|Returns|Raises|Attributes|Yields):", section.value, re.M
                )
    told = [r.getMessage() for r in caplog.records]
    assert not [t for t in told if "does not appear" not in t and "No type or" not in t]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="another typer is pinned there")
def test_the_command_line_is_current():
    """python -m tools.write_cli_reference"""
    assert PAGE.read_text(encoding="utf-8") == written()
