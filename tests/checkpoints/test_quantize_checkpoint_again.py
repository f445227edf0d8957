"""Quantising on disk when something goes wrong: killed, other work, a broken source."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.tiny_models import qwen3_moe, save
from tmoe.checkpoints import quantize_checkpoint

INDEX = "model.safetensors.index.json"
LAYER = "model.layers.1.mlp.experts"


def quantize(source: Path, out: Path, scheme: str, format: str | None = None):
    return quantize_checkpoint(source, out, scheme, format=format)


PROGRAM = """
import sys, time
from tmoe.checkpoints import quantize_checkpoint, write_shard
real = write_shard.ShardWriter.__exit__
def slow(self, *args):
    if self.path.name.startswith("model-00003"):
        print("writing", flush=True)
        time.sleep(60)
    return real(self, *args)
write_shard.ShardWriter.__exit__ = slow
quantize_checkpoint(sys.argv[1], sys.argv[2], "nvfp4")
"""


def test_a_killed_run_is_taken_up(source, tmp_path):
    """Killed while it writes the third file; the result is the same, bit by bit."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    quantize(source, whole, "nvfp4")
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, source, out], cwd=root, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = {f"model-0000{i}-of-00008.safetensors" for i in (1, 2)}
    assert {file.name for file in out.glob("model-*")} == finished
    assert list(out.glob(".*.tmp")) and not (out / "config.json").exists()
    first = (out / min(finished)).stat().st_mtime_ns
    report = quantize(source, out, "nvfp4")
    assert (report.kept, report.written) == (2, 6)
    assert (out / min(finished)).stat().st_mtime_ns == first
    names = {file.name for file in whole.iterdir()}
    assert {file.name for file in out.iterdir()} == names  # no temporary file either
    for name in names - {".tmoe-quantize.json"}:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    again = quantize(source, out, "nvfp4")
    assert (again.kept, again.written) == (8, 0) and again.errors == report.errors


def test_a_folder_of_other_work_is_refused(source, tmp_path):
    out = tmp_path / "out"
    quantize(source, out, "nvfp4")
    with pytest.raises(ValueError, match="begun with scheme fp8_block, .* begun with scheme nvfp4"):
        quantize(source, out, "fp8_block")
    with pytest.raises(ValueError, match="format modelopt.*format compressed-tensors"):
        quantize(source, out, "nvfp4", "modelopt")
    other = save(qwen3_moe(num_hidden_layers=1), tmp_path / "other")
    with pytest.raises(ValueError, match="this source.*another source"):
        quantize(other, out, "nvfp4")
    for folder in (source, source / "inside", source / ".." / source.name):
        with pytest.raises(ValueError, match="outside the source"):
            quantize(source, folder, "nvfp4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="new or empty folder.*notes.txt"):
        quantize(source, tmp_path / "full", "nvfp4")
    with pytest.raises(ValueError, match="isn't quantised"):
        quantize(out, tmp_path / "twice", "nvfp4")
    for text, match in (("{", "must be in JSON"), ("{}", "a state of tmoe quantize")):
        (out / ".tmoe-quantize.json").write_text(text)
        with pytest.raises(ValueError, match=match):
            quantize(source, out, "nvfp4")


def test_a_lost_output_file_is_made_again(source, tmp_path):
    out = tmp_path / "out"
    quantize(source, out, "fp8_channel")
    file = out / "model-00002-of-00008.safetensors"
    whole = file.read_bytes()
    file.unlink()
    assert quantize(source, out, "fp8_channel").written == 1
    assert file.read_bytes() == whole
    file.write_bytes(whole[:-64])
    assert quantize(source, out, "fp8_channel").written == 1
    assert file.read_bytes() == whole


def break_truncated(folder):
    file = folder / "model-00002-of-00008.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def break_missing(folder):
    (folder / "model-00002-of-00008.safetensors").unlink()


def change(folder, name, new):
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    held = load_file(file)
    held[name] = new(held[name])
    save_file({k: v for k, v in held.items() if v is not None}, file, metadata={"format": "pt"})


def break_nan(folder):
    row = torch.tensor([3])
    change(folder, f"{LAYER}.2.up_proj.weight", lambda t: t.index_fill(0, row, torch.nan))


def break_shape(folder):
    change(folder, f"{LAYER}.2.up_proj.weight", lambda t: t[:64].contiguous())


def break_expert(folder):
    name = f"{LAYER}.2.up_proj.weight"
    change(folder, name, lambda t: None)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("breaks", "match"),
    [
        (break_truncated, r"model-00002-of-00008.safetensors must be \d+ bytes.*got \d+: cut off"),
        (break_missing, "model-00002-of-00008.safetensors must be a safetensors file, got nothing"),
        (break_nan, rf"{LAYER}.2.up_proj.weight must be finite everywhere, got NaN"),
        (break_shape, rf"{LAYER}.2.up_proj.weight must be \(128, 128\), got \(64, 128\)"),
        (break_expert, rf"{LAYER}.2 must be complete with its up, got only .*gate_proj"),
    ],
)
def test_a_broken_source(breaks, match, tmp_path):
    """Named by file and tensor; no file of the output is half written."""
    source = save(qwen3_moe(), tmp_path / "source")
    breaks(source)
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        quantize(source, tmp_path / "out", "nvfp4")
    assert not list(tmp_path.glob("out/.*.tmp")) and not (tmp_path / "out" / "config.json").exists()


def test_sizes_that_a_format_cannot_hold(tmp_path):
    odd = save(qwen3_moe(moe_intermediate_size=72), tmp_path / "odd")
    with pytest.raises(ValueError, match=r"down is 128 x 72, and 72 is no multiple of 16"):
        quantize(odd, tmp_path / "a", "nvfp4")
    with pytest.raises(ValueError, match=r"is .*, and 72 is no multiple of 128"):
        quantize(odd, tmp_path / "b", "fp8_block")
    quantize(odd, tmp_path / "c", "fp8_channel")
    dense = tmp_path / "dense"
    dense.mkdir()
    save_file({"a.weight": torch.ones(2, 2)}, dense / "model.safetensors")
    (dense / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="experts by names such as .*, got llama with a.weight"):
        quantize(dense, tmp_path / "d", "fp8_channel")
