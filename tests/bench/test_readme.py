"""What the README says of speed and accuracy is what the recorded files say."""

from __future__ import annotations

import json
import re
from collections import Counter
from statistics import geometric_mean

import pytest
import torch

from bench.product_tables import DENSE, GROUPED, products_of
from bench.write_docs import PRODUCTS, RESULTS, ROOT, TOGETHER, compared, compared_in_turn
from tmoe.bench.records import read_cells, read_recorded, read_results
from tmoe.bench.roofline import ROOFS
from tmoe.formats import SCHEMES
from tmoe.kernels import tiles as kernel_tiles
from tmoe.kernels.backward_tiles import factor_gradient_tile

TOKENS = (1, 16, 128, 1024, 8192)
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = " ".join(README.split())
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
    slowest = min(behind, key=lambda cell: cell.speedup)
    counts = Counter(cell.tokens for cell in behind)
    assert counts == {8192: 4, 1024: 1} and slowest.tokens == 8192
    said = f"at 8192 tokens by up to {100 * (1 - slowest.speedup):.0f} %, once at 1024."
    assert f"In five cells triton_kernels is ahead: {said}" in README


def test_where_and_when_it_was_recorded():
    results = read_results([RESULTS / "h200_layer.json"])
    machine, versions = results["machine_info"], results["machine_info"]["versions"]
    assert machine["device"] == "NVIDIA H200" and "on one H200, recorded on" in WORDS
    assert f"recorded on {results['datetime'][:10]}: µs per call" in WORDS
    of_torch, of_triton = versions["torch"].partition("+")[0], versions["triton"]
    driver = machine["driver"].rpartition(".")[0]
    assert f"torch {of_torch}, Triton {of_triton}, driver {driver};" in WORDS
    start, end = (round(machine[f"matmul_tflops_at_{when}"]) for when in ("start", "end"))
    assert f"at {start} before the first cell and at {end} after the last" in WORDS
    roof = ROOFS[machine["device"], torch.bfloat16]  # measured together with the peers
    assert f"8192³ matmul ran at {roof.tflops} TFLOP/s then" in WORDS
    again = read_cells(read_results([RESULTS / "h200_routings.json"]), read_recorded(), "triton")
    us = {c.us for c in again if (c.shape, c.tokens, c.routing) == ("mixtral-8x7b", 1024, "random")}
    assert f"took 1346 µs in this run, and {round(us.pop())} µs in the next one" in WORDS


def test_what_it_says_of_quantised_weights():
    results = read_results([RESULTS / "h200_quantized.json"])
    cells = [cell for cell in read_cells(results, read_recorded(), "triton") if cell.peers]

    def mean(scheme, tokens=None):
        wanted = [c.speedup for c in cells if c.scheme == scheme and tokens in (None, c.tokens)]
        return f"{geometric_mean(wanted):.2f} ×"

    assert f"FP8 per tensor {mean('fp8_tensor')}, FP8 per row {mean('fp8_channel')}" in WORDS
    said = f"FP8 in blocks {mean('fp8_block')} (at 8192 tokens {mean('fp8_block', 8192)}; there"
    slowest = min((c for c in cells if c.scheme == "fp8_block"), key=lambda c: c.speedup)
    assert (slowest.tokens, slowest.best_peer) == (8192, "deepgemm")
    said += f" DeepGEMM is up to {100 / slowest.speedup - 100:.0f} % faster on wide experts)"
    assert said in WORDS
    four = f"alone, {mean('mxfp4_a16')} ({mean('mxfp4_a16', 8192)} at 8192 tokens)"
    assert four in WORDS and {c.shape for c in cells if c.scheme == "mxfp4_a16"} == {"gpt-oss-120b"}
    behind = sum(cell.loses for cell in cells)
    assert f"A peer is ahead in {behind} of {len(cells)} cells" in WORDS
    together = [cell for cell in compared() if cell.scheme in TOGETHER]
    over_vllm = geometric_mean([cell.peers["vllm"] / cell.us for cell in together])
    over_best = geometric_mean([cell.speedup for cell in together])
    link = "[together](docs/performance.md#beside-others)"
    said = f"The {len(together)} cells of bf16 and FP8 {link}"
    assert f"{said}: {over_vllm:.2f} × vLLM, {over_best:.2f} × the best peer." in WORDS


def test_what_it_says_of_peers_in_the_same_session():
    cells = compared_in_turn()
    over_vllm = geometric_mean([cell.peers["vllm"] / cell.us for cell in cells])
    over_best = geometric_mean([cell.speedup for cell in cells])
    behind = sorted((cell for cell in cells if cell.loses), key=lambda cell: cell.speedup)
    assert (behind[0].shape, behind[0].tokens, behind[0].scheme) == ("olmoe", 8192, "bfloat16")
    lost = [100 / cell.speedup - 100 for cell in behind[:2]]
    said = (
        f"{over_vllm:.2f} × vLLM, {over_best:.2f} × the best peer of {len(cells)} cells, with a "
        f"peer ahead in {len(behind)} (OLMoE at 8192 tokens in bf16 by {lost[0]:.0f} %, the others "
        f"by up to {lost[1]:.0f} %)"
    )
    assert said in WORDS


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
