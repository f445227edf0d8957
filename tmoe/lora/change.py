"""Put adapters on a model's experts, into their weights, and away."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..checks import expect, expect_type
from ..formats import QuantizedTensor
from ..nn.lora import LORA, ExpertsLora, LoraPair
from .find import Target, adapted, targets

# What `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` sets, without importing
# torch.distributed.
_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def add(
    model: nn.Module,
    rank: int = 16,
    alpha: float = 32.0,
    *,
    projections: Sequence[str] = ("gate_up_proj", "down_proj"),
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Give all experts of `model` adapters, which change nothing before they are trained.

    The weights that they stand on are frozen. What else shall not be trained is frozen by the
    caller: ``model.requires_grad_(False)`` before this call leaves the adapters alone.

    Args:
        model: with `tmoe.MoE` or `tmoe.Experts` inside, or after `tmoe.replace_moe`; the experts'
            weights may be quantised. Where `tmoe.parallel` divided them, all ranks call it.
        rank: of each expert's adapter.
        alpha: the adapters are multiplied by alpha / rank.
        projections: which are adapted; "gate_up_proj" is the first one of ungated experts too.
        dtype: of the adapters; they are computed with in the dtype of the layer's input.

    Returns:
        The names of the modules of experts.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: no experts, or some that can't have adapters; adapters that are there already;
            a rank below 1, an unknown projection.
    """
    op = "lora.add"
    expect_type(rank, int, op, "rank")
    expect(rank >= 1, op, "rank", "at least 1", rank)
    expect_type(alpha, (int, float), op, "alpha")
    known = ("gate_up_proj", "down_proj")
    projections = tuple(projections)
    fits = bool(projections) and set(projections) <= set(known)
    expect(fits, op, "projections", f"some of {', '.join(known)}", projections)
    expect_type(dtype, torch.dtype, op, "dtype")
    expect(dtype.is_floating_point, op, "dtype", "a floating-point one", dtype)
    found = targets(model, op)
    for target in found:
        expect(target.lora is None, op, "model", "one without adapters", f"some in {target.name}")
    for target in found:
        chosen = [w for w, name in zip(target.weights, known, strict=True) if name in projections]
        put(target, {weight: rank for weight in chosen}, alpha, dtype)
        if target.parallel is not None:
            target.parallel.adapters.begin(target.module)
    leave_codes_out_of_ddp(model)
    return [target.name for target in found]


def put(target: Target, ranks: dict[str, int], alpha: float, dtype: torch.dtype) -> None:
    """Give one module of experts its adapters: names of weights and their ranks."""
    pairs = {}
    for weight, rank in ranks.items():
        device = target.module.get_parameter(weight).device
        pairs[weight] = LoraPair(target.sizes(weight), rank, alpha, device=device, dtype=dtype)
    for weight in target.weights:
        target.module.get_parameter(weight).requires_grad_(False)
    target.module.add_module(LORA, ExpertsLora(pairs))


def leave_codes_out_of_ddp(model: nn.Module) -> None:
    """Have `DistributedDataParallel(model)` not send quantised weights to the other ranks when it
    starts, for which it would make one flat tensor of them and others: each rank has read its own.
    """
    codes = [n for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)]
    known = getattr(model, _IGNORED_BY_DDP, [])
    if codes:
        setattr(model, _IGNORED_BY_DDP, list(dict.fromkeys([*known, *codes])))


def merge(model: nn.Module) -> None:
    """Add the adapters into the weights, rounded once; until `unmerge` they do nothing themselves.

    Raises:
        ValueError: no adapters; quantised weights, into which nothing can be added.
    """
    op = "lora.merge"
    found = adapted(model, op)
    for target, _ in found:
        for weight in target.weights:
            quantized = isinstance(target.module.get_parameter(weight), QuantizedTensor)
            wanted = "one whose weights aren't quantised; leave the adapters beside them"
            expect(not quantized, op, "model", wanted, f"{target.name}.{weight}")
    for target, lora in found:
        if not lora.merged:
            _add(target, lora, 1)
            lora.merged = True


def unmerge(model: nn.Module) -> None:
    """Take them out again: the weights are what they were but for rounding."""
    for target, lora in adapted(model, "lora.unmerge"):
        if lora.merged:
            _add(target, lora, -1)
            lora.merged = False


def remove(model: nn.Module) -> None:
    """Take the adapters away. Merged ones stay in the weights, which stay frozen."""
    for target, _ in adapted(model, "lora.remove"):
        delattr(target.module, LORA)


@torch.no_grad()
def _add(target: Target, lora: ExpertsLora, sign: int) -> None:
    for name, pair in lora.named_children():
        assert isinstance(pair, LoraPair)
        weight = target.module.get_parameter(name)
        stored = weight.transpose(1, 2) if target.transposed else weight
        for e in range(pair.lora_A.shape[0]):  # one at a time: no second copy of all
            delta = pair.lora_B[e].float() @ pair.lora_A[e].float() * (sign * pair.scaling)
            stored[e].copy_(stored[e].float() + delta)
