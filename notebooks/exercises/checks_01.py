"""Checks of notebook 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .judging import ask, ask_number, compare, compare_tensors


def active_parameters(answer):
    for E, K, H, I in ((8, 2, 4096, 14336), (4, 1, 16, 8), (256, 8, 7168, 2048)):
        mistakes = {
            "That is what the layer stores. A token uses K of the E experts.": 3 * E * H * I,
            "An expert has three matrices of H · I: gate, up and down.": 2 * K * H * I,
            "That is one expert, and a token goes to K of them.": 3 * H * I,
        }
        got = ask(answer, E, K, H, I)
        compare(got, 3 * K * H * I, f"E={E}, K={K}, H={H}, I={I}", mistakes)


def experts_read(answer):
    for T, E, K in ((1, 8, 2), (16, 128, 8), (1000, 256, 8)):
        unread = (1 - K / E) ** T
        mistakes = {
            "That counts an expert again for every token that chose it.": float(T * K),
            "That is the share of experts; multiply it by E.": 1 - unread,
            "Those are the experts that nobody chose.": E * unread,
        }
        compare(ask_number(answer, T, E, K), E * (1 - unread), f"T={T}, E={E}, K={K}", mistakes)


def moe_layer(answer):
    T, H, E, K, I = 7, 12, 5, 2, 6
    random = torch.Generator().manual_seed(1)
    x, router, gate_up, down = (
        torch.randn(*size, generator=random) for size in ((T, H), (E, H), (E, 2 * I, H), (E, H, I))
    )

    def layer(weigh, gate_first=True):
        logits = x @ router.T
        ids = logits.topk(K).indices
        weights = weigh(logits, ids)
        y = torch.zeros_like(x)
        for e in range(E):
            token, slot = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[token] @ gate_up[e].T).chunk(2, -1)
            hidden = F.silu(gate) * up if gate_first else F.silu(up) * gate
            y[token] += weights[token, slot, None] * (hidden @ down[e].T)
        return y

    def over_chosen(logits, ids):
        return logits.gather(1, ids).softmax(-1)

    mistakes = {
        "The softmax goes over the K chosen logits, not over all E.": layer(
            lambda logits, ids: logits.softmax(-1).gather(1, ids)
        ),
        "The experts' answers are added up without their weights.": layer(
            lambda logits, ids: torch.ones(T, K)
        ),
        "The gate comes first, and silu is applied to it.": layer(over_chosen, gate_first=False),
    }
    got = ask(answer, x, router, gate_up, down, K)
    compare_tensors(got, layer(over_chosen), "7 tokens and 5 experts", mistakes)
