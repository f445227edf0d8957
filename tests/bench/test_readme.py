"""What the README says of speed and accuracy is what the recorded files say."""

from __future__ import annotations

import json
import re
from statistics import geometric_mean

import pytest
import torch

from bench.product_tables import DENSE, GROUPED, products_of
from bench.write_docs import PRODUCTS, RESULTS, ROOT, compared
from tmoe.bench.records import read_cells, read_recorded, read_results
from tmoe.formats import SCHEMES
from tmoe.kernels import tiles as kernel_tiles
from tmoe.kernels.backward_tiles import factor_gradient_tile

TOKENS = (1, 16, 128, 1024, 8192)
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = " ".join(README.split())
ROWS = re.findall(r"^\| ([a-z0-9.-]+) \| [\d, ]+ \| (\d.*) \|$", README, re.MULTILINE)


@pytest.fixture(scope="module")
def cells():
    found = [cell for cell in compared() if cell.scheme == "bfloat16"]
    return {(cell.shape, cell.tokens): cell for cell in found}


def over_vllm(cells):
    return f"{geometric_mean([cell.peers['vllm'] / cell.us for cell in cells]):.2f}"


def over_best(cells):
    return f"{geometric_mean([cell.speedup for cell in cells]):.2f}"


def test_every_number_of_the_table(cells):
    assert {(name, tokens) for name, _ in ROWS for tokens in TOKENS} == cells.keys()
    for name, row in ROWS:
        for tokens, text in zip(TOKENS, row.split(" | "), strict=True):
            cell = cells[name, tokens]
            us = f"{cell.us:.1f}" if cell.us < 100 else f"{cell.us:.0f}"
            over_vllm = cell.peers["vllm"] / cell.us
            assert text == f"{us} ({over_vllm:.2f}, {cell.speedup:.2f})", (name, tokens)


def test_what_it_says_of_all_cells(cells):
    mean = (
        f"{over_vllm(cells.values())} × vLLM, {over_best(cells.values())} × the better of the two"
    )
    assert f"geometric mean: {mean}." in WORDS
    behind = {name: cell.speedup for name, cell in cells.items() if cell.loses}
    assert behind.keys() == {("mixtral-8x7b", 16), ("llama4-scout", 8192)}
    assert "In two cells a peer is ahead, by less than 1 %" in WORDS and min(behind.values()) > 0.99


def test_where_and_when_it_was_recorded():
    results = read_results([RESULTS / "h200_beside.json"])
    machine, versions = results["machine_info"], results["machine_info"]["versions"]
    assert machine["device"] == "NVIDIA H200" and "on one H200, recorded on" in WORDS
    assert f"recorded on {results['datetime'][:10]}: µs per call" in WORDS
    of_torch, of_triton = versions["torch"].partition("+")[0], versions["triton"]
    driver = machine["driver"].rpartition(".")[0]
    said = f"vLLM {versions['vllm']}, torch {of_torch}, Triton {of_triton}, driver {driver};"
    assert said in WORDS
    start, end = (round(machine[f"matmul_tflops_at_{when}"]) for when in ("start", "end"))
    said = f"ran at {start} TFLOP/s before the first cell of the table and at {end} after the last"
    assert said in WORDS


def test_what_it_says_of_fp8():
    cells = compared()
    by_scheme = [
        [c for c in cells if c.scheme == f"fp8_{s}"] for s in ("tensor", "channel", "block")
    ]
    vllm, best = ([mean(group) for group in by_scheme] for mean in (over_vllm, over_best))
    said = f"per tensor {vllm[0]} × vLLM, per channel {vllm[1]} ×, in blocks {vllm[2]} ×; "
    assert said + f"{best[0]} ×, {best[1]} × and {best[2]} × the best peer of each cell" in WORDS
    fp8 = sum(by_scheme, [])
    behind = sorted((cell for cell in fp8 if cell.loses), key=lambda cell: cell.speedup)
    assert (
        f"A peer is ahead in {len(behind)} of {len(fp8)} cells: at 8192 tokens in blocks" in WORDS
    )
    assert {(c.tokens, c.scheme, c.best_peer) for c in behind} == {(8192, "fp8_block", "deepgemm")}
    shapes = ["mixtral-8x7b", "deepseek-v3-ep8", "llama4-scout"]
    assert [cell.shape for cell in behind] == shapes
    first, second, third = (round(100 / cell.speedup - 100) for cell in behind)
    said = (
        f"DeepGEMM is {first} % faster on Mixtral, {second} % on DeepSeek-V3 at EP 8, and level on"
    )
    assert said in WORDS and third == 0
    together = f"{over_vllm(cells)} × vLLM, {over_best(cells)} × the best peer."
    link = f"[{len(cells)} cells](docs/performance.md#beside-others)"
    assert f"The {link} of bf16 and FP8 together: {together}" in WORDS


def test_what_it_says_of_mxfp4():
    results = read_results([RESULTS / "h200_quantized.json"])
    cells = [cell for cell in read_cells(results, read_recorded(), "triton") if cell.peers]
    assert {(cell.scheme, cell.shape) for cell in cells} == {("mxfp4_a16", "gpt-oss-120b")}
    many = over_best([cell for cell in cells if cell.tokens == 8192])
    assert f"on another day: {over_best(cells)} × ({many} × at 8192 tokens)" in WORDS


def test_what_it_says_of_the_demos_model():
    record = json.loads((ROOT / "tmoe" / "demo" / "model" / "training.json").read_text())
    bits = record["held_out_bits_per_byte"]
    assert f"of {record['parameters'] / 1e6:.1f} M parameters" in WORDS
    assert f"**{bits['fp32']} bits per byte** on {record['held_out_bytes']:,} bytes" in WORDS
    assert f"(fp32; {bits['bf16']} in bf16)" in WORDS
    assert f"trained it in {record['seconds']:.0f} s on one H200" in WORDS


def test_what_it_says_of_a_decode_step():
    rows = json.loads((RESULTS / "h200_decode_step.json").read_text(encoding="utf-8"))["rows"]
    found = {(row["experts"], row["tokens"]): row for row in rows}
    ours, theirs = found["replace_moe", 1], found["batched_mm", 1]
    assert f"took {ours['eager_ms']:.1f} ms against {theirs['eager_ms']:.1f} ms" in WORDS
    assert theirs["eager_ms"] == min(
        row["eager_ms"] for row in rows if row["tokens"] == 1 and row["experts"].endswith("_mm")
    )
    assert f"as a CUDA graph {ours['graph_ms']:.2f} ms against" in WORDS
    assert f"{theirs['graph_ms']:.2f} ms, at 16 sequences" in WORDS
    ours, theirs = found["replace_moe", 16], found["grouped_mm", 16]
    assert f"{ours['graph_ms']:.2f} ms against {theirs['graph_ms']:.2f} ms" in WORDS


NAMES = {
    "grouped_mm": "transformers' `grouped_mm`",
    "liger": "Liger's fused MoE",
    "scattermoe": "ScatterMoE",
}


def test_what_it_says_of_training():
    rows = json.loads((RESULTS / "h200_training.json").read_text(encoding="utf-8"))["rows"]
    ours = {(row["shape"], row["tokens"]): row for row in rows if row["way"] == "tmoe"}
    where = (ROOT / "docs" / "status.md").read_text(encoding="utf-8")
    for way, name in NAMES.items():
        pairs = [
            (ours[row["shape"], row["tokens"]], row)
            for row in rows
            if row["way"] == way and "us" in row
        ]
        speedups = [theirs["us"] / mine["us"] for mine, theirs in pairs]
        said = f"{min(speedups):.2f} to {max(speedups):.2f} × as fast as {name} and holds"
        shares = [a["activation_bytes"] / b["activation_bytes"] for a, b in pairs]
        said += f" {min(shares):.2f} to {max(shares):.2f} of its activations"
        assert said in WORDS and said in where
        if way == "grouped_mm":
            of_mixtral = [b["us"] / a["us"] for a, b in pairs if a["shape"] == "mixtral-8x7b"]
            said = f"On Mixtral it is {min(of_mixtral):.2f} to {max(of_mixtral):.2f} × as fast"
            assert said in WORDS and said in where


def test_what_it_says_of_products_through_codes_and_adapters(monkeypatch):
    """They are those of the tiles in use, and those are the recorded fastest, where they are said
    to be."""
    monkeypatch.setattr(kernel_tiles, "architecture", lambda _: "sm_90")
    found = products_of(json.loads(PRODUCTS.read_text(encoding="utf-8")))
    of_qwen = {key[1:]: times for key, times in found.items() if key[0] == "qwen3-30b-a3b"}
    bf16, device = torch.bfloat16, torch.device("cpu")
    over_dense, over_grouped = [], []
    for scheme in ("fp8_block", "mxfp4_a16", "nvfp4_a16"):
        coded = SCHEMES[scheme].weights[-1].format.name
        tile = str(kernel_tiles.frozen_gradient_tile(128, bf16, coded, device))
        both = [
            of_qwen[16384, f"{product} in {scheme}"]
            for product in ("dy · down", "d_hidden · gate_up")
        ]
        tried = [name for name in both[0] if "Tile(" in name]
        assert tile == min(tried, key=lambda tile: sum(times[tile] for times in both))
        over_dense += [times[tile] / times[DENSE] for times in both]
    for tokens in (4096, 16384):
        thin = [of_qwen[tokens, name] for name in ("rows · A, gathered", "d_hidden · B")]
        tile = str(kernel_tiles.low_rank_tile(128, 16, bf16, device))
        tried = [name for name in thin[0] if "Tile(" in name]
        assert tile == min(tried, key=lambda tile: sum(times[tile] for times in thin))
        over_grouped += [times[tile] / times[GROUPED] for times in thin]
        for name, sides in (("d_A", (16, 2048)), ("d_B", (1536, 16))):
            times = of_qwen[tokens, name]
            tile = str(factor_gradient_tile(*sides, bf16))
            over_grouped.append(times[tile] / times[GROUPED])
    said = " ".join((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split())
    slow = f"take {min(over_dense):.1f} to {max(over_dense):.1f} times as long as torch's dense"
    fast = f"take {min(over_grouped):.2f} to {max(over_grouped):.2f} of the time of torch's"
    assert slow in said and fast in said
