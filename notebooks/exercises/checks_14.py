"""Checks of notebook 14."""

from __future__ import annotations

import torch

from .judging import Wrong, ask, compare_tensors


def gradient_of_weights(answer):
    random = torch.Generator().manual_seed(0)
    counts, N, D = [3, 0, 2], 2, 4
    offsets = [0, 3, 3, 5]
    left, right = (torch.randn(sum(counts), n, generator=random) for n in (N, D))
    parts = [slice(a, b) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    wanted = torch.stack([left[part].T @ right[part] for part in parts])
    got = ask(answer, left, right, offsets)
    if isinstance(got, torch.Tensor) and got.shape == (3, D, N):
        raise Wrong("that is its transpose: N comes from left, D from right, and it is (E, N, D).")
    mistakes = {
        "Each expert has rows of its own, from expert_offsets[e] to expert_offsets[e + 1].": (
            left.T @ right
        ).expand(3, N, D),
        "A gradient is the sum over the rows, not their mean.": torch.stack(
            [left[part].T @ right[part] / (part.stop - part.start or torch.nan) for part in parts]
        ),
        "An expert without rows gets zeros, not NaN.": wanted.masked_fill(
            torch.tensor([False, True, False])[:, None, None], torch.nan
        ),
    }
    compare_tensors(got, wanted, f"rows per expert {counts}", mistakes)


def swiglu_backward(answer):
    gate = torch.tensor([-3.0, -0.5, 0.0, 1.0, 4.0])
    up = torch.tensor([1.0, -2.0, 3.0, 0.5, -1.5])
    d_y = torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0])
    s = gate.sigmoid()
    d_gate, d_up = d_y * up * (s + gate * s * (1 - s)), d_y * gate * s
    got = ask(answer, gate, up, d_y)
    if isinstance(got, torch.Tensor) and got.shape == (2, 5):
        got = tuple(got)
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise Wrong("it should return two tensors, d_gate and d_up.")
    case = f"gate {gate.tolist()}, up {up.tolist()}"
    mistakes = {
        "silu(z) is z · sigmoid(z), so its derivative has two terms.": d_y * up * s,
        "That is sigmoid's derivative; silu is z · sigmoid(z).": d_y * up * s * (1 - s),
        "By the chain rule it is multiplied by d_y.": up * (s + gate * s * (1 - s)),
        "gate is multiplied by up, so d_gate has up in it.": d_y * (s + gate * s * (1 - s)),
        "First d_gate, then d_up.": d_up,
    }
    compare_tensors(got[0], d_gate, f"d_gate of {case}", mistakes)
    mistakes = {
        "up is multiplied by silu(gate), not by gate.": d_y * gate,
        "By the chain rule d_up is multiplied by d_y.": gate * s,
    }
    compare_tensors(got[1], d_up, f"d_up of {case}", mistakes)


def router_gradient(answer):
    weights = torch.tensor([[0.7, 0.3], [0.5, 0.5], [0.1, 0.9]])
    d_weights = torch.tensor([[1.0, 0.0], [2.0, -1.0], [-3.0, 1.0]])
    mean = (weights * d_weights).sum(1, keepdim=True)
    mistakes = {
        "Each logit changes all K weights: take off Σ_j weight[j] · d_weight[j].": weights
        * d_weights,
        "Multiply by the weight itself.": d_weights - mean,
        "The sum goes over a token's K slots, not over the tokens.": weights
        * (d_weights - (weights * d_weights).sum(0)),
        "Σ_j weight[j] · d_weight[j] is weighed; a plain mean isn't.": weights
        * (d_weights - d_weights.mean(1, keepdim=True)),
    }
    got = ask(answer, weights, d_weights)
    compare_tensors(got, weights * (d_weights - mean), "3 tokens, 2 experts each", mistakes)
