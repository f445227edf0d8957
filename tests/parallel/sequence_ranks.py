"""One layer in use, step after step: calls of all kinds, training, experts that move."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

import tmoe
from tests.parallel.cases import Case, make_whole, mesh_of
from tests.parallel.shared_memory import shared_memory
from tmoe.parallel import Placement, fixed_tokens, parallelize, rebalance

STEPS = ("exact", "exact", "fixed", "capacity", "deterministic", "train", "rebalance")
EXCHANGES = (None, "all_gather", "all_to_all", "symmetric_memory")


def drawn(draw: random.Random, E: int, counts: Sequence[int]) -> Placement:
    """Any placement with so many slots on each rank."""
    held: list[list[int]] = [[] for _ in counts]
    for e in draw.sample(range(E), E):
        draw.choice([h for h, n in zip(held, counts, strict=True) if len(h) < n]).append(e)
    for h, n in zip(held, counts, strict=True):
        h += draw.sample([e for e in range(E) if e not in h], n - len(h))
        draw.shuffle(h)
    return Placement(E, tuple(map(tuple, held)))


def sequence(rank: int, seed: int, length: int = 8) -> list[str]:
    """Each step gives what the whole layer gives; returns what they were."""
    draw, ranks = random.Random(seed), dist.get_world_size()
    E, own_tokens = draw.choice([ranks, 7, 12]), draw.random() < 0.7
    counts = [min(E, -(-E // ranks) + draw.choice([0, 1, 2]))] * ranks
    case = Case(
        f"seed {seed}", (ranks,), ("x",), (), experts=E, top_k=draw.randint(1, min(E, 5)),
        hidden=draw.choice([16, 13, 40]), intermediate=24,
        layer={"activation": draw.choice(["swiglu", "relu2"]), "bias": draw.random() < 0.4},
    )  # fmt: skip
    whole = make_whole(case).eval().requires_grad_(False)
    if draw.random() < 0.3:
        torch.manual_seed(9)
        tmoe.lora.add(whole, rank=3)
        for pair in whole.experts.lora.children():
            torch.nn.init.normal_(pair.lora_B, std=0.2)
    done: list[str] = []
    with shared_memory():
        layer = copy.deepcopy(whole)
        spread = {"ep": "x", "dp": "x"} if own_tokens else {"ep": "x"}
        parallelize(layer, mesh_of(case), placement=drawn(draw, E, counts), **spread)
        for step in range(length):
            kind, most = draw.choice(STEPS), draw.choice([0, 1, 2, 5, 40])
            layer.experts.parallel.exchange = exchange = draw.choice(EXCHANGES)
            if kind == "train" and exchange == "symmetric_memory":
                layer.experts.parallel.exchange = None
            uneven = own_tokens and kind not in ("fixed", "capacity")
            sizes = [draw.choice([0, 1, most]) if uneven else most for _ in range(ranks)]
            random_x = torch.Generator().manual_seed(100 * step + rank * own_tokens)
            x = torch.randn(sizes[rank], case.hidden, generator=random_x)
            done.append(f"{kind} {exchange} {sizes}")
            if kind == "rebalance":
                rebalance(layer, drawn(draw, E, counts))
                continue
            how = {"fixed": fixed_tokens(), "capacity": fixed_tokens(max(1, most))}
            with how.get(kind, nullcontext()), tmoe.options(deterministic=kind == "deterministic"):
                results = [_result(one, x, kind == "train") for one in (layer, whole)]
            for got, want in zip(*results, strict=True):
                torch.testing.assert_close(
                    got, want, rtol=1e-4, atol=1e-4, msg=lambda text: f"{case}\n{done}\n{text}"
                )
    return done


def _result(layer: tmoe.MoE, x: Tensor, train: bool) -> list[Tensor]:
    """The output, and in training the gradient of x."""
    layer.gate.requires_grad_(train)
    x = x.clone().requires_grad_(train)
    with torch.set_grad_enabled(train):
        y = layer(x)
    if not train:
        return [y]
    y.backward(torch.linspace(-1, 1, max(y.numel(), 1))[: y.numel()].view(y.shape))
    layer.zero_grad()  # or experts that have a gradient wouldn't be moved
    assert x.grad is not None
    return [y.detach(), x.grad]
