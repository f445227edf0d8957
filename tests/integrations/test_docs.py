"""docs/transformers.md: its table is the library's, its numbers are measured."""

from __future__ import annotations

from pathlib import Path

import torch
from typer.testing import CliRunner

import tmoe
from tmoe.checkpoints.write_formats import METHODS, WRITTEN
from tmoe.cli import app
from tmoe.demo.checkpoint import MODEL_DIR, load
from tmoe.formats import SCHEMES

TEXT = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()


def test_the_table_is_up_to_date():
    rows = ["| scheme | formats |", "| --- | --- |"]
    for scheme in SCHEMES:
        methods = [method for method in METHODS if (method, scheme) in WRITTEN]
        rows.append(f"| `{scheme}` | {', '.join(methods)} |")
    wanted = "\n".join(rows)
    assert wanted in TEXT, f"paste this into docs/transformers.md:\n\n{wanted}"


def test_the_report_of_the_demo_model():
    report = tmoe.replace_moe(load(torch.device("cpu"), torch.bfloat16), "nvfp4")
    lines = [line for line in str(report).splitlines() if "layers.0" in line and "dB" in line]
    assert lines and lines[0] in TEXT and str(report).splitlines()[0] in TEXT


def test_the_sizes_of_the_demo_model(tmp_path):
    options = ["--scheme", "nvfp4"]
    done = CliRunner().invoke(app, ["quantize", str(MODEL_DIR), str(tmp_path / "out"), *options])
    (line,) = [line for line in done.stdout.splitlines() if "became" in line]
    assert line.partition(": ")[2] in TEXT
