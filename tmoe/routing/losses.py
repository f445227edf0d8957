"""What training adds so that the experts share the work: two losses, and a bias without a loss.

    load_balancing_loss    E · Σ_e f_e · P_e       f_e: slots of expert e per token; no gradient
                                                   P_e: mean probability of expert e
    router_z_loss          mean over tokens of (log Σ_e exp x_e)²
    update_correction_bias b_e += rate · sign(mean count - count_e)

Sources: Switch Transformer (arXiv 2101.03961), equations 4 to 6, with f counted over all K slots as
transformers' ``load_balancing_loss_func`` does; ST-MoE (arXiv 2202.08906), equation 5;
Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), algorithm 1, as in DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import expect, expect_tensor, expect_type

Layers = Tensor | Sequence[Tensor]


def load_balancing_loss(probs: Layers, topk_ids: Layers, *, mask: Tensor | None = None) -> Tensor:
    """The auxiliary loss of uneven routing: K where it is even, up to E where it is not.

        weights, ids, probs = tmoe.route(logits, routing, return_probs=True)
        loss = loss + 0.01 * tmoe.load_balancing_loss(probs, ids)

    Args:
        probs: (..., E), the softmax of the router's logits: `route`'s, or ``logits.softmax(-1)``;
            or a list with one tensor per layer.
        topk_ids: (..., K) integers, which experts each token got; or a list, one per layer. Ids
            outside [0, E), such as -1, count for no expert.
        mask: of as many elements as a layer has tokens, bool or integer; 0 marks padding, which
            then has no part in the loss, whatever it holds. The same for all layers.

    Returns:
        A float32 scalar (float64 of float64 probs). Of several layers f and P are means over the
        tokens of all of them. Without a token that counts the loss is 0.

    Differentiable in probs; the counts f are constants.
    """
    op = "load_balancing_loss"
    all_probs = _layers(probs, op, "probs")
    all_ids = _layers(topk_ids, op, "topk_ids")
    got = f"{len(all_ids)} layers"
    expect(len(all_ids) == len(all_probs), op, "topk_ids", f"of {len(all_probs)} layers", got)
    for p in all_probs:
        _expect_floats(p, op, "probs")
    E, device = all_probs[0].shape[-1], all_probs[0].device
    slots = torch.zeros(E, dtype=torch.int64, device=device)
    mass = torch.zeros(E, device=device)
    tokens = torch.zeros((), dtype=torch.int64, device=device)
    for p, ids in zip(all_probs, all_ids, strict=True):
        expect(p.shape[-1] == E, op, "probs", f"of {E} experts in every layer", p.shape[-1])
        _expect_integers(ids, op, "topk_ids")
        ok = ids.ndim >= 1 and ids.shape[:-1] == p.shape[:-1]
        expect(ok, op, "topk_ids", f"of shape {(*p.shape[:-1], 'K')}", tuple(ids.shape))
        counted = _counted(mask, p, op).to(device)  # (T,)
        p = p.to(device).flatten(0, -2)
        p = torch.where(counted[:, None], p, 0.0)
        ids = ids.to(device, torch.int64).flatten(0, -2)
        real = counted[:, None] & (ids >= 0) & (ids < E)
        slots = slots.scatter_add(0, torch.where(real, ids, 0).flatten(), real.long().flatten())
        mass = mass + p.sum(0, dtype=_wide(p))
        tokens = tokens + counted.sum()
    tokens = tokens.clamp(min=1)
    return E * ((slots / tokens) * (mass / tokens)).sum()


def router_z_loss(logits: Layers, *, mask: Tensor | None = None) -> Tensor:
    """The auxiliary loss that keeps the router's logits small: mean of ``logsumexp(logits)²``.

    Args:
        logits: (..., E); or a list with one tensor per layer.
        mask: as in `load_balancing_loss`.

    Returns:
        A float32 scalar (float64 of float64 logits), the mean over the tokens of all layers; 0
        without a token that counts. Of a token that counts, NaN stays NaN.
    """
    op = "router_z_loss"
    layers = _layers(logits, op, "logits")
    device = layers[0].device
    total, tokens = torch.zeros((), device=device), torch.zeros((), device=device)
    for x in layers:
        _expect_floats(x, op, "logits")
        counted = _counted(mask, x, op).to(device)
        x = x.to(device, _wide(x)).flatten(0, -2)
        x = torch.where(counted[:, None], x, 0.0)  # before the logsumexp: NaN has NaN gradients
        squares = x.logsumexp(-1).square()
        total = total + torch.where(counted, squares, 0.0).sum()
        tokens = tokens + counted.sum()
    return total / tokens.clamp(min=1)


@torch.no_grad()
def update_correction_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Move the selection bias, in place, towards experts that got less than the mean.

        with tmoe.watch_load(model) as load:
            train_step()
        for name, layer in load.all_reduce().items():
            router = model.get_submodule(name)
            tmoe.update_correction_bias(router.e_score_correction_bias, layer.counts, 1e-3)

    Args:
        bias: (E,), float32 or float64: in 16 bits the small steps would be lost.
        counts: (E,) integers, the slots that each expert got since the last update, of all ranks.
        rate: the size of a step; DeepSeek-V3 trained with 1e-3.

    An expert with exactly the mean keeps its bias. Compared as integers, without rounding.
    """
    op = "update_correction_bias"
    expect_tensor(bias, op, "bias")
    expect_tensor(counts, op, "counts")
    expect_type(rate, (float, int), op, "rate")
    if bias.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{op}: bias must have dtype float32 or float64, got {bias.dtype}")
    _expect_integers(counts, op, "counts")
    expect(bias.ndim == 1, op, "bias", "of shape (E,)", tuple(bias.shape))
    ok = counts.shape == bias.shape
    expect(ok, op, "counts", f"of shape {tuple(bias.shape)}", tuple(counts.shape))
    counts = counts.long()
    below = counts.sum() - counts * counts.numel()  # E · (mean - count), without a division
    bias += rate * below.sign().to(bias)


def _layers(value: Layers, op: str, arg: str) -> Sequence[Tensor]:
    layers = [value] if isinstance(value, Tensor) else value
    expect_type(layers, (list, tuple), op, arg)
    expect(len(layers) > 0, op, arg, "a tensor or at least one layer", "none")
    for layer in layers:
        expect_tensor(layer, op, arg)
    return layers


def _counted(mask: Tensor | None, rows: Tensor, op: str) -> Tensor:
    """(T,) bool: does the token count?"""
    T = rows.shape[:-1].numel()
    if mask is None:
        return torch.ones(T, dtype=torch.bool, device=rows.device)
    expect_tensor(mask, op, "mask")
    if mask.is_floating_point() or mask.is_complex():  # an additive mask is 0 where a token counts
        raise TypeError(f"{op}: mask must be bool or integer, got {mask.dtype}")
    expect(mask.numel() == T, op, "mask", f"of {T} elements, one per token", tuple(mask.shape))
    return mask.reshape(T) != 0


def _expect_floats(x: Tensor, op: str, arg: str) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{op}: {arg} must have a floating-point dtype, got {x.dtype}")
    expect(x.ndim >= 2, op, arg, "of shape (..., E) with a dimension of tokens", tuple(x.shape))


def _expect_integers(x: Tensor, op: str, arg: str) -> None:
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {arg} must have dtype int32 or int64, got {x.dtype}")


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
