"""Right answers to the exercises that aren't written, or don't return, as the solutions do."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate, permutations

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl


def _dense_layer(x, router, gate_up, down, top_k):
    logits = (x @ router.T).double()
    kth = logits.sort(descending=True).values[:, top_k - 1, None]
    weights = logits.masked_fill(logits < kth, -math.inf).softmax(-1)
    y = 0.0
    for e in range(len(router)):
        gate, up = (x @ gate_up[e].T).tensor_split(2, dim=1)
        y = y + weights[:, e, None] * ((gate * gate.sigmoid() * up) @ down[e].T)
    return y


@triton.jit
def _clamped(out_ptr, x_ptr, n, factor, BLOCK: tl.constexpr):
    start = BLOCK * tl.program_id(0)
    for lane in range(BLOCK):
        if start + lane < n:
            tl.store(out_ptr + start + lane, factor * tl.load(x_ptr + start + lane))


def _sort_in_place(scores, k):
    """Changes what it is given."""
    found = []
    for _ in range(k):
        found.append(scores.index(max(scores)))
        scores[found[-1]] = -math.inf
    return found


def _kept_by_torch(choices, n_group, topk_group):
    groups = torch.tensor(choices, dtype=torch.float64).view(n_group, -1)
    scores = groups.topk(min(2, groups.shape[1])).values.sum(1)
    return scores.argsort(descending=True, stable=True)[:topk_group].sort().values


def _biased_by_torch(scores, bias, k):
    scores, bias = torch.tensor(scores), torch.tensor(bias)
    weights = scores[(scores + bias).topk(k).indices]
    return weights / weights.sum()


def _rows_by_numpy(experts, num_experts):
    experts = np.array(experts)
    rows = np.full(len(experts), -1)
    here = np.flatnonzero((experts >= 0) & (experts < num_experts))
    rows[here[np.argsort(experts[here], kind="stable")]] = np.arange(len(here))
    return rows


def _tiles(offsets, m):
    for expert, end in enumerate(offsets[1:]):
        for first in range(offsets[expert], end, m):
            yield [expert, first, min(first + m, end)]


def _blocks_by_einsum(a, a_scale, w, w_scale, block):
    a, w = (t.unflatten(1, (-1, block)) for t in (a, w))
    return torch.einsum("tbd,nbd,tb,nb->tn", a, w, a_scale, w_scale)


def _combine_by_loop(rows, slot_to_row):
    y = torch.zeros(len(slot_to_row), rows.shape[1])
    for t, of_token in enumerate(slot_to_row.tolist()):
        for row in of_token:
            if row != -1:
                y[t] += rows[row]
    return y


def _spread_by_numpy(numbers):
    orders = np.array(list(permutations(numbers)), dtype=np.float32)
    total = np.zeros(len(orders), np.float32)
    for column in orders.T:
        total = total + column
    return np.float64(total.max()) - np.float64(total.min())


def _why_not(problem):
    wrong = []
    if str(problem.dtype) not in ("torch.bfloat16", "torch.float16"):
        wrong.append(f"no {problem.dtype}")
    if problem.hidden & 127:
        wrong.append(f"hidden {problem.hidden} isn't k * 128")
    return " and ".join(wrong) or None


def _choose(answers):
    found = dict(answers)
    if None in found.values():
        return next(name for name in found if found[name] is None)
    raise RuntimeError(f"nobody: {found}")


def _gradient_by_loop(left, right, expert_offsets):
    out = torch.zeros(len(expert_offsets) - 1, left.shape[1], right.shape[1], dtype=torch.float64)
    for e, (begin, end) in enumerate(zip(expert_offsets, expert_offsets[1:], strict=False)):
        for r in range(begin, end):
            out[e] += torch.outer(left[r], right[r])
    return out


def _swiglu_by_autograd(gate, up, d_y):
    gate, up = gate.requires_grad_(), up.requires_grad_()
    return torch.stack(torch.autograd.grad(F.silu(gate) * up, (gate, up), d_y))


def _router_by_jacobian(weights, d_weights):
    jacobian = torch.diag_embed(weights) - weights[:, :, None] * weights[:, None, :]
    return (jacobian @ d_weights[:, :, None]).squeeze(2)


def _interleave(t, n, I, interleaved):
    rows = torch.arange(2 * I).view(-1, 2).T if interleaved else torch.arange(2 * I).view(2, -1)
    return rows[:, t * n : t * n + n].flatten()


def _local_by_table(ids, first, n):
    table = {first + local: local for local in range(n)}
    return tuple(table.get(e, -1) for e in ids)


def _lift(ids, is_kind, expert):
    mine, kind = np.array([expert in chosen for chosen in ids]), np.array(is_kind)
    return mine[kind].mean() / mine.mean()


RIGHT = {
    "active_parameters": lambda E, K, H, I: torch.tensor(3) * K * H * I,
    "experts_read": lambda T, E, K: np.float32(E) * (1 - np.float32(1 - K / E) ** T),
    "moe_layer": _dense_layer,
    "programs_needed": lambda n, block: (n + block - 1) / block // 1,
    "places_of": lambda pid, block, n: range(pid * block, min(n, pid * block + block)),
    "scale_kernel": _clamped,
    "best_experts": _sort_in_place,
    "biased_weights": _biased_by_torch,
    "kept_groups": _kept_by_torch,
    "exclusive_offsets": lambda counts: accumulate(counts, initial=0),
    "rows_of_slots": _rows_by_numpy,
    "count_tiles": lambda counts, m: np.ceil(np.array(counts) / m).sum(),
    "padded_rows": lambda counts, m: sum(c + -c % m for c in counts),
    "tiles_of": _tiles,
    "busy_share": lambda tiles, workers: Fraction(tiles, tiles + -tiles % workers) * 1.0,
    "bytes_saved": lambda S, I, size: 4.0 * S * I * size,
    "rows_of_tile": _interleave,
    "clamped_swiglu": lambda g, u, m: F.silu(g.minimum(torch.tensor(m))) * u.clip(-m, m).double(),
    "token_scales": lambda x: x.abs().max(1).values / 448 + (x == 0).all(1),
    "round_to_step": lambda x, step: torch.tensor([round(v / step) * step for v in x.tolist()]),
    "blockwise_product": _blocks_by_einsum,
    "e2m1_code": lambda a: (
        sum(a > b for b in (0.25, 1.25, 2.5, 5)) + sum(a >= b for b in (0.75, 1.75, 3.5))
    ),
    "pack": lambda codes: bytes(a + 16 * b for a, b in zip(codes[::2], codes[1::2], strict=True)),
    "ceil_exponent": lambda largest: next(e for e in range(-40, 40) if largest <= 6 * 2.0**e),
    "combine_rows": _combine_by_loop,
    "spread": _spread_by_numpy,
    "why_not": _why_not,
    "choose": _choose,
    "floor_us": lambda f, b, peak, gbs: np.maximum(f / peak, 1000 * b / gbs) / 1e6,
    "tokens_at_the_ridge": lambda E, K, size, ridge: torch.tensor(ridge * size * E / (2 * K)),
    "most_stages": lambda m, n, d, size, kib: int(kib / ((m + 2 * n) * d * size / 1024)),
    "rows_to_send": lambda ids, of, P: np.bincount(
        [r for t in ids for r in {of[e] for e in t}], minlength=P
    ),
    "local_ids": lambda ids, first, n: tuple(
        e - first if e in range(first, first + n) else -1 for e in ids
    ),
    "busiest": lambda loads, ranks: max(
        sum(loads[e] / sum(r.count(e) for r in ranks) for e in held) for held in ranks
    ),
    "bits": lambda chances: -np.log2(np.array(chances, np.float32)).mean(),
    "specialisation": lambda ids, kind, e: (
        np.mean([e in t for t, k in zip(ids, kind, strict=True) if k])
        / np.mean([e in t for t in ids])
    ),
    "gradient_of_weights": _gradient_by_loop,
    "swiglu_backward": _swiglu_by_autograd,
    "router_gradient": _router_by_jacobian,
}
