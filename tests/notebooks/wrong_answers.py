"""Typical wrong answers to the exercises: by name, pairs of an answer and a word of the hint."""

from __future__ import annotations

import math
from itertools import accumulate, permutations

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


def _best(scores, k):
    return sorted(range(len(scores)), key=lambda e: -scores[e])[:k]


def _shares(values, ids):
    return [values[e] / sum(values[i] for i in ids) for e in ids]


def _bias_in_the_weights(scores, bias, k):
    choices = [s + b for s, b in zip(scores, bias, strict=True)]
    return _shares(choices, _best(choices, k))


def _groups(choices, n_group, topk_group, score):
    size = len(choices) // n_group
    scores = [score(choices[g * size : (g + 1) * size]) for g in range(n_group)]
    return sorted(_best(scores, topk_group))


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def _above(a):
    """The border that a lies below or on: the lower code wins there."""
    return next(border for border in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 1e9) if a <= border)


def _pairs(codes):
    return zip(codes[0::2], codes[1::2], strict=True)


def _sum32(numbers):
    total = torch.tensor(0.0)
    for number in numbers:
        total = total + number
    return total.item()


def _spread(orders):
    results = [sum(order) for order in orders]  # Python's own floats
    return max(results) - min(results)


def _accepts(problem):
    return problem.dtype in (torch.bfloat16, torch.float16) and problem.hidden % 128 == 0


def _first_or_raise(answers, message):
    for name, reason in answers:
        if reason is None:
            return name
    raise RuntimeError(f"{answers[0][0]}: {message}")


def _share(ids, is_kind, expert):
    chosen = [expert in c for c, kind in zip(ids, is_kind, strict=True) if kind]
    return sum(chosen) / len(chosen)


def _gradients(product):
    def gradients(left, right, offsets):
        pairs = zip(offsets[:-1], offsets[1:], strict=True)
        return torch.stack([product(left[a:b], right[a:b]) for a, b in pairs])

    return gradients


def _swiglu(gate, up, d_y):
    s = gate.sigmoid()
    return d_y * up * (s + gate * s * (1 - s)), d_y * gate * s


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
        (lambda tiles, workers: tiles / (max(tiles // workers, 1) * workers), "Round the rounds"),
        (lambda tiles, workers: -(-tiles // workers), "number of rounds. Wanted"),
    ],
    "best_experts": [
        (lambda s, k: sorted(range(len(s)), key=lambda e: (-s[e], -e))[:k], "lower index"),
        (lambda s, k: sorted(s, reverse=True)[:k], "not their scores"),
    ],
    "biased_weights": [
        (_bias_in_the_weights, "must not enter"),
        (lambda s, b, k: _shares(s, _best(s, k)), "by the score alone"),
    ],
    "kept_groups": [
        (lambda c, n, k: _groups(c, n, k, max), "not its best alone"),
        (lambda c, n, k: _groups(c, n, k, sum), "not all of them"),
    ],
    "bytes_saved": [
        (lambda S, I, size: 2 * S * I * size, "read again"),
        (lambda S, I, size: 5 * S * I * size, "in both ways"),
    ],
    "rows_of_tile": [
        (lambda t, n, I, inter: list(range(2 * t * n, 2 * (t + 1) * n)), "row I + n"),
        (lambda t, n, I, inter: [r + h for h in (0, I) for r in range(t * n, t * n + n)], "2n + 1"),
    ],
    "clamped_swiglu": [
        (lambda g, u, m: F.silu(g.clamp(-m, m)) * u.clamp(-m, m), "above only"),
        (lambda g, u, m: (F.silu(g) * u).clamp(-m, m), "before the activation"),
    ],
    "token_scales": [
        (lambda x: x.abs().amax(1) / 448, "zeros"),
        (lambda x: (x.abs().amax() / 448).expand(len(x)), "one scale for all"),
    ],
    "round_to_step": [
        (lambda x, step: (x / step + 0.5).floor() * step, "even multiple"),
        (lambda x, step: (x + 1.5 * 2**23) - 1.5 * 2**23, "*steps*"),
    ],
    "blockwise_product": [
        (lambda a, sa, w, sw, block: (a * sa.repeat_interleave(block, 1)) @ w.T, "w has scales"),
        (lambda a, sa, w, sw, block: (a @ w.T) * sa[:, :1] * sw[:, :1].T, "of its own"),
    ],
    "e2m1_code": [
        (lambda a: [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 1e9].index(_above(a)), "not the lower"),
        (
            lambda a: E2M1[min(range(8), key=lambda c: (abs(min(a, 6) - E2M1[c]), c % 2))],
            "its value",
        ),
    ],
    "pack": [
        (lambda codes: [a << 4 | b for a, b in _pairs(codes)], "low half"),
        (lambda codes: [a + b for a, b in _pairs(codes)], "moved up"),
    ],
    "ceil_exponent": [
        (lambda largest: math.floor(math.log2(largest)) - 2, "rule floor"),
        (lambda largest: math.floor(math.log2(largest / 6)) + 1, "fits exactly"),
    ],
    "combine_rows": [
        (lambda rows, t: (rows[t.long()] * (t >= 0)[..., None]).sum(1), "NaN · 0 is NaN"),
        (lambda rows, t: rows.nan_to_num()[t.clamp(min=0).long()].sum(1), "read as row 0"),
    ],
    "spread": [
        (lambda numbers: _spread(permutations(numbers)), "64 bits"),
        (lambda numbers: abs(_sum32(numbers) - _sum32(numbers[::-1])), "two orders"),
    ],
    "why_not": [
        (
            lambda problem: None if problem.hidden % 128 == 0 else f"{problem.hidden}",
            "yes to float32",
        ),
        (lambda problem: None if _accepts(problem) else "unsupported", "Name what came"),
    ],
    "choose": [
        (lambda answers: [name for name, reason in answers if reason is None][-1], "not the last"),
        (lambda answers: _first_or_raise(answers, answers[0][1]), "'narrow' in it"),
    ],
    "floor_us": [
        (lambda f, b, peak, gbs: f / (1e6 * peak) + b / (1e3 * gbs), "not the sum"),
        (lambda f, b, peak, gbs: max(f / (1e12 * peak), b / (1e9 * gbs)), "seconds"),
    ],
    "tokens_at_the_ridge": [
        (lambda E, K, size, ridge: ridge * size / 2, "rows per expert"),
        (lambda E, K, size, ridge: ridge * size * E / K, "2 flops"),
    ],
    "most_stages": [
        (lambda m, n, d, size, kib: kib * 1024 // ((m + n) * d * size), "gate and up"),
        (lambda m, n, d, size, kib: -(-kib * 1024 // ((m + 2 * n) * d * size)), "Round down"),
    ],
    "rows_to_send": [
        (
            lambda ids, of, P: [sum(of[e] == r for t in ids for e in t) for r in range(P)],
            "there once",
        ),
        (lambda ids, of, P: [sum(of[t[0]] == r for t in ids) for r in range(P)], "only the first"),
    ],
    "local_ids": [
        (lambda ids, first, n: [e if first <= e < first + n else -1 for e in ids], "take off"),
        (lambda ids, first, n: [e - first if e >= first else -1 for e in ids], "behind the last"),
    ],
    "busiest": [
        (
            lambda loads, ranks: max(sum(loads[e] for e in held) for held in ranks),
            "a part of its load",
        ),
        (lambda loads, ranks: sum(loads) / len(ranks), "the mean"),
    ],
    "bits": [
        (lambda chances: -sum(map(math.log, chances)) / len(chances), "nats"),
        (lambda chances: -sum(map(math.log2, chances)), "not the sum"),
    ],
    "specialisation": [
        (lambda ids, kind, e: _share(ids, kind, e), "among all tokens"),
        (
            lambda ids, kind, e: _share(ids, [True] * len(ids), e) / _share(ids, kind, e),
            "upside down",
        ),
    ],
    "gradient_of_weights": [
        (_gradients(lambda left, right: right.T @ left), "transpose"),
        (_gradients(lambda left, right: left.T @ right / len(left)), "not their mean"),
    ],
    "swiglu_backward": [
        (lambda g, u, d: (d * u * g.sigmoid(), d * F.silu(g)), "two terms"),
        (lambda g, u, d: _swiglu(g, u, d)[::-1], "First d_gate"),
    ],
    "router_gradient": [
        (lambda w, d: w * d, "take off"),
        (lambda w, d: d - (w * d).sum(1, keepdim=True), "by the weight itself"),
    ],
}
