"""The store of times: two processes, a killed one, broken files, places that can't be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import fields, replace

import pytest

from tests.processes import python_path
from tmoe.dispatch.store import MeasuredOn, Store

H200 = MeasuredOn("NVIDIA H200", "580.159", "2.11.0", "3.6.0", None, "0.1.0")
TIMES = {"a layer": {"triton": 0.041, "torch": 0.183}}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "times", H200)


def test_what_is_added_is_there_for_the_next_process(store, tmp_path):
    assert store.read() == {} and not (tmp_path / "times").exists()
    assert store.add(TIMES)
    assert Store(tmp_path / "times", H200).read() == TIMES
    assert json.loads(store.path.read_text())["machine"]["gpu"] == "NVIDIA H200"


def test_times_are_merged_newer_ones_win(store, tmp_path):
    store.add(TIMES)
    other = Store(tmp_path / "times", H200)
    other.add({"a layer": {"triton": 0.039, "flashinfer_trtllm": 0.037}, "another": {"torch": 1}})
    assert Store(tmp_path / "times", H200).read() == {
        "a layer": {"triton": 0.039, "torch": 0.183, "flashinfer_trtllm": 0.037},
        "another": {"torch": 1.0},
    }


def test_a_whole_entry_takes_the_place_of_the_old_one(store, tmp_path):
    store.add({**TIMES, "another": {"torch": 1.0}})
    Store(tmp_path / "times", H200).add({"a layer": {"torch": 2.0}}, whole=True)
    assert store.read()["another"] == {"torch": 1.0}
    assert Store(tmp_path / "times", H200).read()["a layer"] == {"torch": 2.0}
    store.add({"a layer": {"triton": 3.0}}, whole=True)
    assert store.read()["a layer"] == {"triton": 3.0}
    store.add({"a layer": {}}, whole=True)
    assert "a layer" not in Store(tmp_path / "times", H200).read()


@pytest.mark.parametrize("field", [f.name for f in fields(H200)], ids="another {}".format)
def test_another_machine_knows_nothing_of_it(store, tmp_path, field):
    """CG05"""
    store.add(TIMES)
    elsewhere = Store(tmp_path / "times", replace(H200, **{field: "other"}))
    assert elsewhere.path != store.path and elsewhere.read() == {}
    elsewhere.path.write_text(store.path.read_text())  # somebody renamed a file
    assert elsewhere.read() == {}


BROKEN = {
    "empty": "",
    "truncated": '{"machine": {"gpu": "NVIDIA H',
    "not JSON": "\x00\x01\x02",
    "not ours": '["a list"]',
    "nested without end": "[" * 100_000,
    "no machine": '{"times": {"a layer": {"triton": 1.0}}}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_a_miss_and_is_mended_by_the_next_write(store, content):
    store.path.parent.mkdir()
    store.path.write_text(content)
    assert store.read() == {}
    assert store.add(TIMES) and store.read() == TIMES


def test_bytes_that_are_no_text_are_a_miss(store):
    store.path.parent.mkdir()
    store.path.write_bytes(b"\xff\xfe\x80")
    assert store.read() == {}


def test_entries_that_make_no_sense_are_left_out(store):
    store.add(TIMES)
    content = json.loads(store.path.read_text())
    content["times"] |= {
        "text": "fast", "list": [1], "none": {}, "good": {"triton": 2, "torch": "slow"},
        "huge": {"a": 10**400},
        "bad": {"a": -1.0, "b": float("nan"), "c": float("inf"), "d": True, "e": None, "f": 0},
    }  # fmt: skip
    store.path.write_text(json.dumps(content))
    assert store.read() == {**TIMES, "good": {"triton": 2.0}}


def test_where_nothing_can_be_written_this_process_remembers_and_says_why_once(tmp_path):
    """EN03"""
    (tmp_path / "home").write_text("a file: nothing can be made below it")
    store = Store(tmp_path / "home" / "times", H200)
    with pytest.warns(UserWarning, match="can't keep what it measured in .*: Not a directory"):
        assert not store.add(TIMES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not store.add({"another": {"torch": 1.0}})
    assert store.problem == "Not a directory"
    assert store.read() == {**TIMES, "another": {"torch": 1.0}}


def test_a_lock_that_is_held_is_waited_for_and_then_given_up(store, monkeypatch):
    from filelock import FileLock

    from tmoe.dispatch import store as module

    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    store.path.parent.mkdir()
    with FileLock(f"{store.path}.lock"), pytest.warns(UserWarning, match="can't keep"):
        assert not store.add(TIMES)
    assert store.add(TIMES)


WRITER = """
import sys
from pathlib import Path
from tmoe.dispatch.store import MeasuredOn, Store

store = Store(Path(sys.argv[1]), MeasuredOn(*{machine!r}))
print("ready", flush=True)
for i in range(int(sys.argv[3])):
    store.add({{f"{{sys.argv[2]}} {{i}}": {{"triton": 1.0 + i}}}})
"""


def writer(folder, name, count):
    source = textwrap.dedent(WRITER).format(
        machine=(H200.gpu, H200.driver, H200.torch, H200.triton, H200.flashinfer, H200.tmoe)
    )
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-c", source, str(folder), name, str(count)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_processes_lose_nothing_of_each_other(tmp_path):
    """CG06, CG07: one folder, several writers at once."""
    names = ("one", "two", "three", "four")
    writers = [writer(tmp_path, name, 20) for name in names]
    assert [process.wait(timeout=120) for process in writers] == [0, 0, 0, 0]
    wanted = {f"{name} {i}": {"triton": 1.0 + i} for name in names for i in range(20)}
    assert Store(tmp_path, H200).read() == wanted


def test_a_process_killed_while_it_writes_leaves_a_whole_file(tmp_path):
    store = Store(tmp_path, H200)
    store.add(TIMES)
    for delay in (0.0, 0.01, 0.03):
        process = writer(tmp_path, "killed", 10_000)
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.kill()
        process.wait(timeout=60)
        content = json.loads(store.path.read_text())
        assert content["times"]["a layer"] == TIMES["a layer"]
    assert store.add({"after": {"torch": 2.0}}) and "after" in Store(tmp_path, H200).read()
