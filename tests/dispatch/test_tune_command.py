"""``tmoe tune``: what it prints, keeps and takes up again, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from tests.dispatch.conftest import forget
from tests.dispatch.tuning import pretend_times
from tmoe import tune as module
from tmoe.cli import app
from tmoe.dispatch import measure
from tmoe.dispatch.known import MODELS, Layer
from tmoe.kernels.tiles import LayerTiles, Tile

pytestmark = pytest.mark.usefixtures("empty_store")

SHAPE = "E=2,K=1,H=32,I=16"
BEST = "16x16x32 w4 s2"


def invoke(*args):
    return CliRunner().invoke(app, ["tune", *args, "--dtype", "fp32"])


@pytest.fixture
def timed(monkeypatch):
    """What was timed: three tiles and two backends, of which `BEST` and Triton are the fastest."""
    seen = pretend_times(monkeypatch, {BEST: 0.0413, "triton": 0.0525, "torch": 1.5}, 0.06)

    def candidates(problem, way, device):
        tile = Tile(16, 16, 32, 4, 2)
        return [LayerTiles(tile, tile)], [LayerTiles(tile, Tile(16, 32, 32, 4, 2))]

    monkeypatch.setattr("tmoe.backends.triton_backend.candidates", candidates)
    return seen


def test_it_prints_what_it_found_and_where_it_is(timed, empty_store):
    done = invoke(SHAPE, "--tokens", "1,5")
    assert done.exit_code == 0, done.output
    words = " ".join(done.stdout.split())
    for said in ("<= 1", "<= 8", "plain, rows", "52.5 us", "41.3 us", "torch 1.500 ms", "(of 3)"):
        assert said in words
    (file,) = (empty_store / "times").glob("*.json")
    assert str(file) in done.stdout.replace("\n", "")
    if not torch.cuda.is_available():
        assert "these times say little" in " ".join(done.stderr.split())


def test_what_it_found_is_used_and_explained(timed):
    invoke(SHAPE, "--tokens", "5")
    forget()
    sizes = ["--experts", "2", "--top-k", "1", "--hidden", "32", "--intermediate", "16"]
    done = CliRunner().invoke(app, ["explain", *sizes, "--tokens", "7", "--dtype", "fp32"])
    assert (
        "-> triton" in done.output and "41.3 us" in done.output and f"tiles {BEST}" in done.output
    )


def test_it_goes_on_where_it_stopped(timed):
    assert invoke(SHAPE, "--tokens", "1").exit_code == 0
    count = len(timed)
    assert count == 5
    forget()  # another process
    done = invoke(SHAPE, "--tokens", "1,2")
    assert done.exit_code == 0 and len(timed) == 2 * count and "<= 1" in done.stdout
    assert invoke(SHAPE, "--tokens", "1,2", "--again").exit_code == 0
    assert len(timed) == 4 * count


def test_json(timed):
    done = invoke(SHAPE, "--tokens", "8,3", "--json", "--quick")
    found = json.loads(done.stdout)
    assert found["path"].endswith(".json") and [row["tokens"] for row in found["tuned"]] == [4, 8]
    (tiles,) = found["tuned"][0]["tiles"]
    assert tiles == {
        "way": "plain, rows", "tiles": BEST, "num_tried": 1, "before_ms": 0.0525,
        "after_ms": 0.0413,
    }  # fmt: skip
    assert found["tuned"][0]["backends"] == {"triton": 0.0413, "torch": 1.5}


@pytest.mark.parametrize(("scheme", "kind"), [("mxfp4_a16", "decoded"), ("fp8_tensor", "fp8")])
def test_schemes_and_activations(scheme, kind, timed, monkeypatch):
    met = []
    monkeypatch.setattr(module, "random_inputs", spy(module.random_inputs, met))
    done = invoke("E=2,K=2,H=32,I=32", "--tokens", "2", "--scheme", scheme,
                  "--activation", "geglu", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["tuned"]
    assert row["tiles"][0]["way"].startswith(kind) and row["backends"]
    assert met[0].top_k == 2 and met[0].hidden == 32


def spy(real, seen):
    def call(first, *rest):
        seen.append(first)
        return real(first, *rest)

    return call


def test_real_times(empty_store, monkeypatch):
    """Nothing replaced: the candidates and the clock as they are."""
    monkeypatch.setattr(measure, "WARM_UPS", 1)
    monkeypatch.setattr(measure, "REPEATS", 1)
    done = invoke("E=2,K=1,H=16,I=16", "--tokens", "1", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["tuned"]
    (tiles,) = row["tiles"]
    assert tiles["num_tried"] > 2 and 0 < tiles["after_ms"] <= tiles["before_ms"]
    assert set(row["backends"]) == {"torch", "triton"} and min(row["backends"].values()) > 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["mixtral"], "mixtral-8x7b"),
        (["E=8,K=2,H=64"], "E=8,K=2,H=4096,I=14336"),
        (["E=8,E=8,K=2,H=64,I=16"], "E=8,K=2,H=4096,I=14336"),
        (["E=8,K=2,H=64,I=0"], "E=8,K=2,H=4096,I=14336"),
        (["E=8,K=9,H=64,I=16"], "at most E = 8"),
        ([SHAPE, "--tokens", "1,,2"], "positive numbers"),
        ([SHAPE, "--tokens", "0"], "positive numbers"),
        ([SHAPE, "--tokens", "many"], "positive numbers"),
        ([SHAPE, "--scheme", "fp9"], "nvfp4"),
        ([SHAPE, "--activation", "tanh"], "swiglu"),
    ],
)
def test_what_makes_no_sense_is_refused(args, said, timed):
    done = invoke(*args)
    assert done.exit_code == 2 and said in " ".join(done.output.split())
    assert timed == []


def test_every_model_can_be_named():
    for name, layer in MODELS.items():
        assert module.parse_layer(name) == layer
    assert module.parse_layer("I=16, H=32, K=2, E=4") == Layer(4, 2, 32, 16)


def test_times_that_cannot_be_kept_exit_with_one(timed, empty_store):
    (empty_store / "times").write_text("a file: nothing can be made below it")
    with pytest.warns(UserWarning, match="can't keep"):
        done = invoke(SHAPE, "--tokens", "1")
    assert done.exit_code == 1 and "41.3 us" in done.stdout
    assert "\nnot kept: " in done.stdout and "\nkept in" not in done.stdout


def test_sizes_that_a_scheme_has_no_room_for_exit_with_one(timed):
    done = invoke("E=8,K=2,H=63,I=16", "--scheme", "nvfp4", "--tokens", "1")
    assert done.exit_code == 1 and "even row length" in done.stderr
    assert isinstance(done.exception, SystemExit) and timed == []


def test_a_layer_that_is_too_large_exits_with_one(timed, monkeypatch, empty_store):
    real = module.random_inputs

    def inputs(shape, num_tokens, *rest):
        if num_tokens > 1:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return real(shape, num_tokens, *rest)

    monkeypatch.setattr(module, "random_inputs", inputs)
    done = invoke(SHAPE, "--tokens", "1,2")
    assert done.exit_code == 1 and "9 GiB" in done.stderr
    assert "<= 1" in done.stdout and list((empty_store / "times").glob("*.json"))


def test_a_killed_run_keeps_what_it_finished(tmp_path):
    source = (
        "import sys, time; from tmoe import tune; real = tune.random_inputs\n"
        "def inputs(shape, num_tokens, *rest):\n"
        "    if num_tokens > 1:\n"
        "        print('second', flush=True); time.sleep(300)\n"
        "    return real(shape, num_tokens, *rest)\n"
        "tune.random_inputs = inputs\n"
        "from tmoe.dispatch import measure; measure.WARM_UPS = measure.REPEATS = 1\n"
        "from tmoe.cli import app; app()"
    )
    command = [sys.executable, "-c", source, "tune", SHAPE, "--tokens", "1,2", "--quick"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout.readline() == "second\n"
        time.sleep(0.1)
    finally:
        process.kill()
        process.wait(timeout=60)
    (file,) = (tmp_path / "times").glob("*.json")
    assert len(json.loads(file.read_text())["times"]) == 2  # of the tiles, of the backends
