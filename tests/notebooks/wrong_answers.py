"""Typical wrong answers to the exercises: by name, pairs of an answer and a word of the hint."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


def _moe_layer(weigh):
    def layer(x, router, gate_up, down, top_k):
        logits = x @ router.T
        ids = logits.topk(top_k).indices
        weights = weigh(logits, ids)
        y = torch.zeros_like(x)
        for t in range(len(x)):
            for k, e in enumerate(ids[t].tolist()):
                gate, up = (gate_up[e] @ x[t]).chunk(2)
                y[t] += weights[t, k] * (down[e] @ (F.silu(gate) * up))
        return y

    return layer


@triton.jit
def _no_mask(out_ptr, x_ptr, n, factor, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + places, factor * tl.load(x_ptr + places))


@triton.jit
def _no_program_id(out_ptr, x_ptr, n, factor, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(
        out_ptr + places,
        factor * tl.load(x_ptr + places, mask=places < n, other=0.0),
        mask=places < n,
    )


def _greedy_tiles(offsets, block_m):
    """Tiles that go on across the experts' borders."""
    rows = range(0, offsets[-1], block_m)
    owner = lambda r: next(e for e in range(len(offsets) - 1) if r < offsets[e + 1])  # noqa: E731
    return [(owner(r), r, min(r + block_m, offsets[-1])) for r in rows]


def _whole_tiles(offsets, block_m):
    pairs = enumerate(zip(offsets[:-1], offsets[1:], strict=True))
    return [(e, r, r + block_m) for e, (a, b) in pairs for r in range(a, b, block_m)]


WRONG = {
    "active_parameters": [
        (lambda E, K, H, I: 3 * E * H * I, "stores"),
        (lambda E, K, H, I: 2 * K * H * I, "three matrices"),
    ],
    "experts_read": [
        (lambda T, E, K: 1 - (1 - K / E) ** T, "share"),
        (lambda T, E, K: T * K, "again for every token"),
    ],
    "moe_layer": [
        (_moe_layer(lambda logits, ids: logits.softmax(-1).gather(1, ids)), "not over all E"),
        (_moe_layer(lambda logits, ids: torch.ones(ids.shape)), "without their weights"),
    ],
    "programs_needed": [
        (lambda n, block: n // block, "round up"),
        (lambda n, block: n // block + 1, "one too many"),
    ],
    "places_of": [
        (lambda pid, block, n: list(range(pid * block, (pid + 1) * block)), "don't exist"),
        (lambda pid, block, n: list(range(min(block, n))), "Program 1 starts"),
    ],
    "scale_kernel": [(_no_mask, "mask"), (_no_program_id, "program_id")],
    "exclusive_offsets": [
        (lambda counts: list(accumulate(counts)), "inclusive"),
        (lambda counts: [0, *accumulate(counts)][:-1], "missing"),
    ],
    "rows_of_slots": [
        (lambda ids, E: torch.argsort(torch.tensor(ids), stable=True).tolist(), "inverse"),
        (
            lambda ids, E: torch.argsort(torch.argsort(torch.tensor(ids), stable=True)).tolist(),
            "get -1",
        ),
    ],
    "count_tiles": [
        (lambda counts, m: -(-sum(counts) // m), "mix experts"),
        (lambda counts, m: sum(c // m for c in counts), "Round up"),
    ],
    "padded_rows": [
        (lambda counts, m: -(-sum(counts) // m) * m, "by itself"),
        (lambda counts, m: sum(-(-c // m) for c in counts), "Those are the tiles"),
    ],
    "tiles_of": [(_whole_tiles, "use min"), (_greedy_tiles, "next expert")],
    "busy_share": [
        (lambda tiles, workers: tiles / (max(tiles // workers, 1) * workers), "rounds up"),
        (lambda tiles, workers: -(-tiles // workers), "number of rounds. Wanted"),
    ],
}
