"""The README's table of speeds is what the recorded files say."""

from __future__ import annotations

import json
import re
from statistics import geometric_mean

import pytest

from bench.write_docs import RESULTS, ROOT
from tmoe.bench.records import read_cells, read_recorded, read_results

TOKENS = (1, 16, 128, 1024, 8192)
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([a-z0-9.-]+) \| [\d, ]+ \| (\d.*) \|$", README, re.MULTILINE)


@pytest.fixture(scope="module")
def cells():
    results = read_results([RESULTS / "h200_layer.json"])
    found = read_cells(results, read_recorded(), "triton")
    return {(cell.shape, cell.tokens): cell for cell in found if cell.peers}


def test_every_number_of_the_table(cells):
    assert {(name, tokens) for name, _ in ROWS for tokens in TOKENS} == cells.keys()
    for name, row in ROWS:
        for tokens, text in zip(TOKENS, row.split(" | "), strict=True):
            cell = cells[name, tokens]
            us = f"{cell.us:.1f}" if cell.us < 100 else f"{cell.us:.0f}"
            over_vllm = cell.peers["vllm"] / cell.us
            assert text == f"{us} ({over_vllm:.2f}, {cell.speedup:.2f})", (name, tokens)


def test_what_it_says_of_all_cells(cells):
    over_vllm = geometric_mean([cell.peers["vllm"] / cell.us for cell in cells.values()])
    over_best = geometric_mean([cell.speedup for cell in cells.values()])
    said = f"geometric mean: {over_vllm:.2f} × vLLM, {over_best:.2f} × the best peer of each cell"
    assert said in README
    behind = [cell for cell in cells.values() if cell.loses]
    assert len(behind) == 5 and {cell.best_peer for cell in behind} == {"triton_kernels"}
    assert "In five cells triton_kernels is ahead" in README


def test_what_it_says_of_a_decode_step():
    rows = json.loads((RESULTS / "h200_decode_step.json").read_text(encoding="utf-8"))["rows"]
    found = {(row["experts"], row["tokens"]): row for row in rows}
    ours, theirs = found["replace_moe", 1], found["batched_mm", 1]
    assert f"took {ours['eager_ms']:.1f} ms against {theirs['eager_ms']:.1f} ms" in README
    assert theirs["eager_ms"] == min(
        row["eager_ms"] for row in rows if row["tokens"] == 1 and row["experts"].endswith("_mm")
    )
    assert f"as a CUDA graph {ours['graph_ms']:.2f} ms against" in README
    assert f"{theirs['graph_ms']:.2f} ms, at 16 sequences" in README
    ours, theirs = found["replace_moe", 16], found["grouped_mm", 16]
    assert f"{ours['graph_ms']:.2f} ms against {theirs['graph_ms']:.2f} ms" in README


def test_what_it_says_of_training():
    rows = json.loads((RESULTS / "h200_training.json").read_text(encoding="utf-8"))["rows"]
    found = {(row["way"], row["shape"], row["tokens"]): row for row in rows}
    pairs = [
        (found["tmoe", shape, tokens], row)
        for (way, shape, tokens), row in found.items()
        if way == "grouped_mm"
    ]
    speedups = [theirs["us"] / ours["us"] for ours, theirs in pairs]
    assert f"{min(speedups):.2f} to {max(speedups):.2f} × as fast" in README
    shares = [ours["activation_bytes"] / theirs["activation_bytes"] for ours, theirs in pairs]
    assert f"holds {min(shares):.2f} to {max(shares):.2f} of its activations" in README
