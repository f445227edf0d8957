"""Forward beside any store: files are read once, and nothing that stands there makes it fail."""

from __future__ import annotations

import builtins
import json
import os
import warnings
from pathlib import Path

import pytest

import tmoe
from tests.dispatch.conftest import forget
from tests.dispatch.tuning import BEST, LAYER_TILES, know, layer, problem
from tmoe.dispatch import measure
from tmoe.dispatch.problem import Machine

pytestmark = pytest.mark.usefixtures("empty_store")


def refuse(*args, **more):
    raise AssertionError(f"opened {args}")


def test_only_the_first_call_looks_at_a_file(device, monkeypatch):
    know(device, {BEST: 1.0})
    forget()
    tmoe.fused_experts(*layer(device))
    for where, name in ((builtins, "open"), (os, "open"), (Path, "open"), (Path, "read_text")):
        monkeypatch.setattr(where, name, refuse)
    tmoe.fused_experts(*layer(device))
    tmoe.fused_experts(*layer(device, tokens=40))  # a problem that nobody asked about yet
    with tmoe.options(batch_invariant=True):
        tmoe.fused_experts(*layer(device))


def broken(content):
    def breaking(store):
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_bytes(content)

    return breaking


def unreadable(store):  # by root too
    store.unlink(missing_ok=True)
    store.mkdir(parents=True)


def read_only_home(store):
    store.unlink(missing_ok=True)
    store.parent.rmdir()
    store.parent.write_text("a file: nothing can be made below it")


def of_another_version(store):
    content = json.loads(store.read_text())
    content["machine"]["tmoe"] = "0.0.0"
    store.write_text(json.dumps(content))


def missing_home(store):
    store.unlink()
    store.parent.rmdir()
    store.parent.parent.rmdir()


HUGE = "1" + 400 * "0"
STATES = {
    "empty": broken(b""),
    "truncated": lambda store: store.write_bytes(store.read_bytes()[:-40]),
    "no text": broken(b"\xff\xfe\x80"),
    "no numbers": lambda store: store.write_text(store.read_text().replace("1.0", '"1"')),
    "huge numbers": lambda store: store.write_text(store.read_text().replace("1.0", HUGE)),
    "unreadable": unreadable,
    "read-only home": read_only_home,
    "missing home": missing_home,
    "another version's": of_another_version,
}  # fmt: skip


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_forward_is_at_peace_with_any_store(state, tmp_path, monkeypatch, launched, device):
    monkeypatch.setenv("TMOE_CACHE_DIR", str(tmp_path / "home"))
    forget()
    know(device, {BEST: 1.0}, backends={"triton": 1.0})
    store = measure.store_of(Machine.of(device)).path
    for path in store.parent.glob("*.lock"):
        path.unlink()
    state(store)
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = tmoe.fused_experts(*layer(device))
        assert not measure.known_times(problem(device))
    assert y.isfinite().all() and LAYER_TILES.gate_up not in launched
