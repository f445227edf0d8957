"""The tables of what `bench.training` recorded: a step's time, and what it holds, beside peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tmoe.bench.tables import Grid, Row

Json = dict[str, Any]
OURS = ("tmoe", "tmoe, recompute")


def training_tables(found: Json) -> Iterator[str]:
    """Times, then memory, in Markdown, and which peers failed where, with the reason."""
    rows = found["rows"]
    ways = {(row["shape"], row["tokens"], row["way"]): row for row in rows}
    peers = tuple(dict.fromkeys(row["way"] for row in rows if row["way"] not in OURS))
    cells = [
        (shape, tokens, [ways.get((shape, tokens, name), {}) for name in (*OURS, *peers)])
        for shape, tokens, way in ways
        if way == "tmoe"
    ]
    machine = found["machine_info"]
    peak = machine["matmul_tflops_at_start"]
    title = (
        f"µs, {machine['device']}, torch's matmul at {peak:.0f} TFLOP/s, commit {machine['commit']}"
    )
    yield _times(title, peers, cells, peak).as_markdown()
    yield _memory(peers, cells).as_markdown()
    failures = [
        "* {shape} T={tokens} {way}: {failed}".format(**row) for row in rows if "failed" in row
    ]
    if failures:
        yield "\n".join(failures)


def _times(title: str, peers: tuple[str, ...], cells: list[Any], peak: float) -> Grid:
    columns = ["layer", "T", "tmoe", "TFLOP/s", "% of matmul", "recomputed"]
    columns += [f"{peer} (speedup)" for peer in peers]
    lines = []
    for shape, tokens, (ours, again, *others) in cells:
        texts = [shape, str(tokens), _text(ours, "us"), _text(ours, "tflops")]
        texts += [f"{100 * ours['tflops'] / peak:.0f}", _text(again, "us")]
        for peer in others:
            texts += [f"{peer['us']:.0f} ({peer['us'] / ours['us']:.2f})" if "us" in peer else "–"]
        lines.append(Row(tuple(texts)))
    return Grid(title, tuple(columns), tuple(lines))


def _memory(peers: tuple[str, ...], cells: list[Any]) -> Grid:
    """Activations in MiB; the last column compares with the peer that holds least."""
    columns = ("layer", "T", "tmoe", "recomputed", *peers, "of the least peer's")
    lines = []
    for shape, tokens, both in cells:
        texts = (_text(row, "activation_bytes", 2**20) for row in both)
        held = [row["activation_bytes"] for row in both[2:] if "activation_bytes" in row]
        share = f"{both[0]['activation_bytes'] / min(held):.2f}" if held else "–"
        lines.append(Row((shape, str(tokens), *texts, share)))
    return Grid("activations, MiB", columns, tuple(lines))


def _text(row: Json, key: str, scale: float = 1.0) -> str:
    return f"{row[key] / scale:.0f}" if key in row else "–"
