"""Checks of notebook 11."""

from __future__ import annotations

from .judging import ask, ask_number, compare


def floor_us(answer):
    for flops, num_bytes, tflops, gbs in ((1e12, 1e9, 500, 4000), (1e9, 2e9, 746, 4350)):
        arithmetic, memory = flops / (1e6 * tflops), num_bytes / (1e3 * gbs)
        mistakes = {
            "Both happen at the same time: the larger one counts, not the sum.": arithmetic
            + memory,
            "The larger of the two counts; nothing is done before both are.": min(
                arithmetic, memory
            ),
            "Those are seconds.": max(arithmetic, memory) / 1e6,
            "Those are milliseconds.": max(arithmetic, memory) / 1e3,
        }
        case = f"{flops:g} flops, {num_bytes:g} bytes, {tflops} TFLOP/s, {gbs} GB/s"
        got = ask_number(answer, flops, num_bytes, tflops, gbs)
        compare(got, max(arithmetic, memory), case, mistakes)


def tokens_at_the_ridge(answer):
    for E, K, size, ridge in ((128, 8, 2, 171.5), (8, 2, 1, 323.0)):
        rows = ridge * size / 2
        mistakes = {
            "Those are rows per expert. A token makes K rows, and E experts share them.": rows,
            "A token makes K rows, so fewer tokens will do.": rows * E,
            "Multiplying and adding are 2 flops per weight and row.": 2 * rows * E / K,
            "A weight has `itemsize` bytes.": ridge / 2 * E / K,
        }
        case = f"E={E}, K={K}, {size} bytes per weight, ridge {ridge}"
        compare(ask_number(answer, E, K, size, ridge), rows * E / K, case, mistakes)


def most_stages(answer):
    for m, n, d, size, kib in ((128, 128, 64, 2, 227), (16, 64, 128, 2, 227), (64, 64, 32, 4, 100)):
        stage, room = (m + 2 * n) * d * size, kib * 1024
        mistakes = {
            "A gated tile has gate and up: 2 · block_n rows of weights.": room
            // ((m + n) * d * size),
            "A KiB has 1024 bytes.": kib * 1000 // stage,
            "Round down: a stage that fits partly doesn't fit.": -(-room // stage),
            "A number has `itemsize` bytes.": room // (stage // size),
        }
        case = f"{m} × {n} × {d}, {size} bytes per number, {kib} KiB"
        compare(ask(answer, m, n, d, size, kib), room // stage, case, mistakes)
