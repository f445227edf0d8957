"""Made-up routing for benchmarks and tests: weights and ids without a router."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import expect, expect_size, expect_type

DISTRIBUTIONS = ("uniform", "balanced", "skewed", "one_expert", "same_experts")
CHUNK = 2**24  # scores drawn at once: 64 MB


def simulate_routing(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    distribution: str = "uniform",
    *,
    skew: float = 1.0,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Routing weights and ids as `route` returns them, with a load that is known beforehand.

        weights, ids = tmoe.simulate_routing(8192, 128, 8, "skewed", device="cuda")

    Args:
        num_tokens, num_experts, top_k: T, E and K.
        distribution: how the slots spread over the experts.

            * ``"uniform"``: every token draws K experts at random.
            * ``"balanced"``: the experts' counts differ by at most 1. What a perfectly trained
              router would do.
            * ``"skewed"``: some experts are popular; of rank r, with weight r^-skew (Zipf). Each
              token draws K different ones.
            * ``"one_expert"``: one expert is chosen by every token, the other slots are uniform.
            * ``"same_experts"``: all tokens choose the same K experts.
        skew: exponent of ``"skewed"``; 0 is uniform.
        seed: same seed, same routing. Which experts are the popular ones depends on it too.
        device: of the results; torch's default device if None. The numbers are drawn on the CPU,
            so they are the same on any.

    Returns:
        weights (T, K) float32, positive, descending, of sum 1; ids (T, K) int32, distinct within a
        token.

    Raises:
        TypeError, ValueError: with the argument's name, what was wanted and what came.
    """
    op = "simulate_routing"
    T, E, K = num_tokens, num_experts, top_k
    for name, size, least in (("num_tokens", T, 0), ("num_experts", E, 1), ("top_k", K, 1)):
        expect_size(size, op, name, least)
    expect(K <= E, op, "top_k", f"at most num_experts={E}", K)
    expect_type(distribution, str, op, "distribution")
    ok, names = distribution in DISTRIBUTIONS, ", ".join(DISTRIBUTIONS)
    expect(ok, op, "distribution", f"one of {names}", repr(distribution))
    expect_type(skew, (float, int), op, "skew")
    expect_size(seed, op, "seed", least=0)
    ok = distribution == "skewed" or skew == 1.0
    expect(ok, op, "skew", f"1 with {distribution}, which has none", skew)
    random = torch.Generator("cpu").manual_seed(seed)
    experts = torch.randperm(E, generator=random, device="cpu")  # the popular ones first
    if distribution == "same_experts":
        ids = experts[:K].expand(T, K)
    elif distribution == "balanced":
        slots = torch.arange(T * K, device="cpu").view(T, K)
        ids = experts[slots % E][torch.randperm(T, generator=random, device="cpu")]
    else:
        popularity = torch.zeros(E, device="cpu")
        if distribution == "skewed":
            popularity = -skew * torch.arange(1.0, E + 1, device="cpu").log()
        elif distribution == "one_expert":
            popularity[0] = torch.inf
        ids = experts[_draw(popularity, T, K, random)]
    scores = torch.randn(T, K, generator=random, device="cpu")
    weights = scores.softmax(-1).sort(-1, descending=True).values
    device = torch.get_default_device() if device is None else device
    return weights.to(device), ids.int().contiguous().to(device)


def _draw(log_weights: Tensor, T: int, K: int, random: torch.Generator) -> Tensor:
    """(T, K): K of E without replacement, with odds exp(log_weights): Gumbel's top-k.

    Source: Kool et al., Stochastic Beams and Where to Find Them, arXiv 1903.06059.
    """
    E = len(log_weights)
    drawn = [torch.empty(0, K, dtype=torch.int64, device="cpu")]
    for start in range(0, T, max(1, CHUNK // E)):
        rows = min(T - start, max(1, CHUNK // E))
        noise = torch.empty(rows, E, device="cpu").exponential_(generator=random)
        drawn.append((log_weights - noise.log()).topk(K, dim=-1).indices)
    return torch.cat(drawn)
