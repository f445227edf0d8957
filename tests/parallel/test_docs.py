"""docs/parallel.md: its table is current."""

from __future__ import annotations

import json
import statistics

import torch

import tmoe
from tests.parallel.document import PAGE, RECORD, beside_experts, written
from tmoe.bench.shapes import SHAPES
from tmoe.parallel.exchange_model import MOST_PEER_BYTES, bytes_needed
from tmoe.parallel.peers import SMALLEST

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_is_current():
    """python -m tests.parallel.document"""
    assert written(TEXT) == TEXT and "| deepseek-v3 | bf16 | 1 |" in TEXT


def slower_rank(tokens: int, draws: int = 30, calls: int = 8) -> tuple[float, float]:
    """Mean and deviation, over draws: by how much more the rank with more experts in use has, call
    by call, than a rank on average. Of two, as bench.parallel routes DeepSeek-V3's tokens."""
    shape, found = SHAPES["deepseek-v3"], []
    E, K = shape.num_experts, shape.top_k
    for draw in range(draws):
        used = []
        for call in range(calls):
            seed = 100_000 * draw + call
            ids = tmoe.simulate_routing(2 * tokens, E, K, seed=seed, device="cpu")[1]
            hit = torch.bincount(ids.flatten().long(), minlength=E) > 0
            used.append(hit.view(2, E // 2).sum(1).tolist())
        most = statistics.mean(map(max, used))
        found.append(most / max(map(statistics.mean, zip(*used, strict=True))) - 1)
    return statistics.mean(found), statistics.stdev(found)


def test_waiting_for_the_slower_rank():
    """What docs/parallel.md has of it: 2.5 ± 1.1 % with 16 tokens a rank, 10.8 ± 5.1 % with one."""
    for tokens, mean, deviation in ((16, 0.025, 0.011), (1, 0.108, 0.051)):
        found = slower_rank(tokens)
        assert abs(found[0] - mean) < deviation / 2 and abs(found[1] - deviation) < deviation / 2


def test_what_is_said_of_the_record():
    rows = json.loads(RECORD.read_text())["rows"]

    def lost(name: str) -> set[tuple[str, int]]:
        shared = [row for row in rows if f"{name}_beside_us" in row]
        return {(row["scheme"], row["tokens"]) for row in shared
                if row[f"{name}_beside_us"] > row[f"{name}_in_turn_us"]}  # fmt: skip

    assert lost("symmetric_memory") == set()
    assert lost("all_gather") == {("bf16", 128), ("bf16", 1024)}
    assert lost("all_to_all") == {("bf16", 1024)}
    name = "symmetric_memory"
    left = [beside_experts(row, name) - row[f"{name}_exchange_us"]
            for row in rows if row["tokens"] == 128]  # fmt: skip
    assert f"{min(left):.0f} to {max(left):.0f} µs are left" in TEXT
    experts = {row["tokens"]: row[f"{name}_experts_us"] for row in rows[:2]}
    assert f"of {experts[1]:.0f} µs" in TEXT and f"of {experts[16]:.0f} µs" in TEXT


def test_what_symmetric_memory_holds():
    """docs/parallel.md: DeepSeek-V3 in bf16."""
    hidden, row_bytes, held = 7168, 2 * 7168 + 128, {}
    for ranks in (2, 8):
        for tokens in (128, 1024):
            everything = bytes_needed(ranks, tokens, row_bytes, 4 * hidden, 1)
            sums = (ranks - 1) * tokens * 4 * hidden
            parts = [max(SMALLEST, 1 << (n - 1).bit_length()) for n in (everything - sums, sums)]
            held[ranks, tokens] = sum(parts) >> 20
    assert MOST_PEER_BYTES == 1 << 30 and list(held.values()) == [12, 96, 64, 512]
    words = (
        "12 MiB of each of two GPUs at 128 tokens a rank and 96 MiB at 1024, with eight ranks 64 "
    )
    assert f"{words}and 512 MiB" in " ".join(TEXT.split())
