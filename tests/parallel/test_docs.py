"""docs/parallel.md: its table is current."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import torch

import tmoe
from tests.parallel.document import FEW, PAGE, RECORD, beside_experts, cell, written
from tmoe.bench.shapes import SHAPES
from tmoe.parallel.exchange_model import MOST_PEER_BYTES, bytes_needed
from tmoe.parallel.peers import SMALLEST

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_is_current():
    """python -m tests.parallel.document"""
    assert written(TEXT) == TEXT and "| deepseek-v3 | bf16 | 1 |" in TEXT


def busier_rank(tokens: int, draws: int = 30, calls: int = 8) -> tuple[float, float]:
    """Mean and deviation, over draws: by how much more the rank with more experts in use has, call
    by call, than both on average. Of two, as bench.parallel routes DeepSeek-V3's tokens."""
    shape, found = SHAPES["deepseek-v3"], []
    E, K = shape.num_experts, shape.top_k
    for draw in range(draws):
        used = []
        for call in range(calls):
            seed = 100_000 * draw + call
            ids = tmoe.simulate_routing(2 * tokens, E, K, seed=seed, device="cpu")[1]
            hit = torch.bincount(ids.flatten().long(), minlength=E) > 0
            used.append(hit.view(2, E // 2).sum(1).tolist())
        found.append(statistics.mean(map(max, used)) / statistics.mean(map(statistics.mean, used)))
    return statistics.mean(found) - 1, statistics.stdev(found)


def test_waiting_for_the_busier_rank():
    """Also in µs of the recorded experts, which are the busier rank's."""
    rows, text = json.loads(RECORD.read_text())["rows"], " ".join(TEXT.split())
    experts = {row["tokens"]: row["symmetric_memory_experts_us"] for row in rows[:2]}
    for tokens, mean, deviation in ((16, 0.036, 0.008), (1, 0.175, 0.043)):
        found = busier_rank(tokens)
        assert abs(found[0] - mean) < deviation / 2 and abs(found[1] - deviation) < deviation / 2
        us = experts[tokens]
        waiting, spread = us * (1 - 1 / (1 + mean)), us * deviation / (1 + mean) ** 2
        part = f"{100 * mean:.1f} ± {100 * deviation:.1f} %"
        assert part in text and f"{waiting:.0f} ± {spread:.0f} of {us:.0f} µs" in text
    assert busier_rank(128)[0] < 0.001
    shape = SHAPES["deepseek-v3"]
    missed = (1 - shape.top_k / shape.num_experts) ** 32
    assert f"some {shape.num_experts / 2 * (1 - missed):.0f} on each" in " ".join(TEXT.split())


def test_what_is_said_of_overlap():
    rows = json.loads(RECORD.read_text())["rows"]

    def slower(name: str) -> dict[tuple[str, int], float]:
        shared = [row for row in rows if f"{name}_beside_us" in row]
        more = {(row["scheme"], row["tokens"]): row[f"{name}_beside_us"] - row[f"{name}_in_turn_us"]
                for row in shared}  # fmt: skip
        return {key: us for key, us in more.items() if us > -1}

    assert slower("symmetric_memory") == slower("all_to_all") == {}
    found = slower("all_gather")
    assert found.keys() == {("bf16", 128), ("bf16", 1024)} and abs(found["bf16", 1024]) < 0.5
    assert f"it is {found['bf16', 128]:.0f} µs slower than in turn" in " ".join(TEXT.split())


def test_what_is_said_beside_the_exchange_alone():
    rows = json.loads(RECORD.read_text())["rows"]
    text = " ".join(TEXT.split())

    def left(names: tuple[str, ...], wanted: Callable[[int], bool]) -> list[float]:
        return [beside_experts(row, name) - row[f"{name}_exchange_us"]
                for row in rows for name in names if wanted(row["tokens"])]  # fmt: skip

    own, nccl = (
        left(("symmetric_memory",), FEW.__ge__),
        left(("all_gather", "all_to_all"), FEW.__ge__),
    )
    assert f"*+* is {min(own):.0f} to {max(own):.0f} µs more than the exchange alone" in text
    assert f"and {min(nccl):.0f} to {max(nccl):.0f} µs with NCCL's" in text
    least = min(left(("symmetric_memory", "all_gather", "all_to_all"), (8192).__eq__))
    assert f"below the exchange alone, by up to {-least:.0f} µs" in text
    (twice,) = (row for row in rows if cell(row) == "deepseek-v3 bf16 T=8192")
    assert f"all-to-all took {twice['all_to_all_us']:.0f} µs for DeepSeek-V3 in bf16" in text
    assert f"and {twice['all_to_all_routed_us']:.0f} where its router ran too" in text


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
