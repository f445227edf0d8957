"""docs/routing.md: its table and pictures are current."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import tmoe

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "routing.md").read_text()
METHODS = [method.name for method in tmoe.RoutingMethod]
DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("draw_routing", DOCS / "draw_routing.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_table_has_every_method():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*)\|$", PAGE, flags=re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted(METHODS)
    for name, _, _, takes in rows:
        rule = tmoe.routing.RULES[tmoe.RoutingMethod[name]]
        takes = takes.strip().split(", ")
        assert ("b" in takes) == rule.takes_bias
        assert ("c" in takes) == rule.takes_scaling_factor
        assert ("groups" in takes) == rule.takes_groups


def shown_numbers(path):
    text = ET.parse(path).getroot().find(f".//{DUBLIN_CORE}description").text
    return json.loads(text)


@pytest.mark.parametrize("method", METHODS)
def test_picture_shows_what_route_returns(method, drawing):
    path = drawing.path_of(method)
    assert f"images/{path.name}" in PAGE
    assert path.stat().st_size < 100_000
    shown, now = shown_numbers(path), asdict(drawing.picture(method))
    for name, value in now.items():
        if value and isinstance(value, list) and isinstance(value[0], float):
            assert shown.pop(name) == pytest.approx(value, abs=2e-4)
        else:
            assert shown.pop(name) == value
    assert not shown


@pytest.mark.parametrize("method", METHODS)
def test_picture_tells_the_truth_about_the_choice(method, drawing):
    """What the panel shows explains the ids: the largest choices, within the kept groups."""
    p = drawing.picture(method)
    choices = torch.tensor(p.choices)
    if p.kept_groups:
        groups = torch.arange(len(choices)) // (len(choices) // len(p.group_scores))
        kept = torch.isin(groups, torch.tensor(p.kept_groups))
        assert len(p.kept_groups) == drawing.TOPK_GROUP
        assert choices.argmax() not in choices.where(kept, -torch.inf).topk(2).indices, (
            "the picture is there to show that a group rules its experts out"
        )
        choices = choices.where(kept, -torch.inf)
    assert choices.topk(len(p.ids)).indices.tolist() == p.ids
    alt = re.search(rf"!\[({method}: .*)\]\(images/routing-{method}.svg\)", PAGE)[1]
    for expert, weight in zip(p.ids, p.weights, strict=True):
        assert str(expert) in alt and f"{weight:.2f}" in alt


def test_drawing_twice_gives_the_same_bytes(drawing, tmp_path):
    twice = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in twice:
        drawing.save(drawing.picture("DeepSeekV3"), path)
    assert twice[0].read_bytes() == twice[1].read_bytes()
