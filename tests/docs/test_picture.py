"""The picture of the README shows what is computed and recorded now."""

from __future__ import annotations

import importlib.util
import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict

import pytest

from tests.docs.blocks import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw_overview.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_it_shows_what_is_computed_and_recorded(drawing):
    """python docs/draw_overview.py"""
    text = ET.parse(drawing.PATH).getroot().find(f".//{DUBLIN_CORE}description").text
    assert json.loads(text) == asdict(drawing.shown())
    assert drawing.PATH.stat().st_size < 150_000
    assert f"]({drawing.PATH.relative_to(ROOT).as_posix()})" in README


def test_its_words_say_the_same(drawing):
    times = drawing.shown().times
    said = f"takes vLLM {times['vllm']}, triton_kernels {times['triton_kernels']} and "
    assert f"{said}transformers' grouped_mm {times['grouped_mm']} times as long as tmoe" in README


def test_drawing_twice_gives_the_same_bytes(drawing, tmp_path):
    twice = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in twice:
        drawing.save(drawing.shown(), path)
    assert twice[0].read_bytes() == twice[1].read_bytes()
