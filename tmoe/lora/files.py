"""Adapters on disk, as PEFT has them: adapter_config.json and adapter_model.safetensors.

PEFT keeps the adapter of a stacked parameter as two matrices: lora_A (E · rank, inputs) by expert,
and lora_B (outputs, rank · E) with the expert as its last index. Two parameters of one module are
two wrappers, one inside the other: the first one's names have ``base_layer.`` in them.

Source: ``ParamWrapper`` of PEFT 0.21.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from ..checks import expect
from ..nn.lora import ExpertsLora, LoraPair
from ..whole_file import whole_file
from .change import leave_codes_out_of_ddp, put
from .find import Target, adapted, targets

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# PEFT refuses some of these for parameters of experts, and the others aren't read here.
USUAL = {
    "peft_type": "LORA",
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "lora_dropout": 0.0,
    "lora_bias": False,
}


def save(model: nn.Module, folder: str | Path) -> None:
    """Write the adapters to `folder`, for `load` and for ``PeftModel.from_pretrained``.

    Of experts that `tmoe.parallel` divided, those of all ranks, as one rank would have written
    them: all ranks call it, and the first of those that share experts writes.

    Raises:
        ValueError: the model has no adapters.
    """
    found = []
    for target, lora in adapted(model, "lora.save"):
        parallel = target.parallel
        whole = lora if parallel is None else parallel.adapters.whole(target.module)
        if whole is not None:
            found.append((target, whole))
    if found:
        _write(model, found, Path(folder))


def _write(model: nn.Module, found: Iterable[tuple[Target, ExpertsLora]], folder: Path) -> None:
    tensors: dict[str, Tensor] = {}
    parameters = set()
    ranks, alphas = set(), set()
    for target, lora in found:
        names = list(lora._modules)
        parameters |= {f"{_name(target)}.{name}" for name in names}
        for name, pair in lora.named_children():
            assert isinstance(pair, LoraPair)
            ranks.add(pair.rank)
            alphas.add(pair.alpha)
            a, b = _as_peft_has_it(target, pair)
            where = _key(target, names, name)
            tensors |= {f"{where}.lora_A.weight": a, f"{where}.lora_B.weight": b}
    one = len(ranks) == 1 and len(alphas) == 1
    expect(one, "lora.save", "model", "one with one rank and one alpha", (ranks, alphas))
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None),
        "inference_mode": True,
        "r": ranks.pop(),
        "lora_alpha": alphas.pop(),
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [],
        "target_parameters": sorted(parameters),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / TENSORS) as file:
        file.write(save_tensors(tensors, metadata={"format": "pt"}))
    with whole_file(folder / CONFIG) as file:
        file.write(json.dumps(config, indent=2).encode() + b"\n")


def load(model: nn.Module, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> list[str]:
    """Put the adapters that `save`, or PEFT, wrote to `folder` on the experts of `model`; where
    `tmoe.parallel` divided them, this rank's part.

    Returns:
        The names of the modules of experts that have adapters now.

    Raises:
        ValueError: adapters of another kind, of other modules than experts, or of other sizes;
            the model has adapters already.
    """
    op = "lora.load"
    found = targets(model, op)
    config = json.loads((Path(folder) / CONFIG).read_text())
    for name, usual in USUAL.items():
        got = config.get(name, usual)
        expect(got == usual or not got, op, "folder", f"adapters with {name} {usual}", got)
    alpha, rank = config["lora_alpha"], config["r"]
    if config.get("use_rslora"):
        alpha = alpha * rank**0.5
    tensors = load_tensors((Path(folder) / TENSORS).read_bytes())
    made = []
    for target in found:
        expect(target.lora is None, op, "model", "one without adapters", f"some in {target.name}")
        read = _take(target, tensors, rank, op)
        if not read:
            continue
        put(target, {name: rank for name in read}, alpha, dtype)
        assert target.lora is not None
        for name, (a, b) in read.items():
            pair: Any = target.lora._modules[name]
            if target.parallel is not None:
                a, b = target.parallel.adapters.own(target.module, name, a, b)
            with torch.no_grad():
                pair.lora_A.copy_(a)
                pair.lora_B.copy_(b)
        made.append(target.name)
    expect(not tensors, op, "folder", "adapters of experts of this model alone", sorted(tensors))
    leave_codes_out_of_ddp(model)
    return made


def _key(target: Target, names: list[str], name: str) -> str:
    """Where PEFT has the adapter of the parameter `name` of those that are adapted."""
    inner = ".base_layer" * (len(names) - 1 - names.index(name))
    return f"{PREFIX}{_name(target)}{inner}"


def _name(target: Target) -> str:
    """In the model itself, where a `PeftModel` with adapters on other modules stands around it."""
    return target.name.removeprefix(PREFIX)


def _as_peft_has_it(target: Target, pair: LoraPair) -> tuple[Tensor, Tensor]:
    a, b = pair.lora_A.detach(), pair.lora_B.detach()
    if target.swapped:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1).contiguous()


def _take(
    target: Target, tensors: dict[str, Tensor], rank: int, op: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs of one module, (E, rank, D) and (E, N, rank), taken out of `tensors`."""
    keys = [_key(target, list(target.weights), name) for name in target.weights]
    if f"{keys[0]}.lora_A.weight" in tensors:
        found = dict(zip(target.weights, keys, strict=True))
    elif f"{keys[1]}.lora_A.weight" in tensors:  # one of the two, and its size says which
        rows = tensors[f"{keys[1]}.lora_B.weight"].shape[0]
        outputs = [target.whole_sizes(name)[2 if target.swapped else 1] for name in target.weights]
        fits = rows in outputs and outputs[0] != outputs[1]
        expect(fits, op, "folder", f"rows of {keys[1]}.lora_B among {outputs}", rows)
        found = {target.weights[outputs.index(rows)]: keys[1]}
    else:
        return {}
    read = {}
    for name, key in found.items():
        E, N, D = target.whole_sizes(name)
        if target.swapped:
            N, D = D, N
        a, b = (tensors.pop(f"{key}.lora_{part}.weight") for part in "AB")
        for part, tensor, shape in (("A", a, (E * rank, D)), ("B", b, (N, rank * E))):
            fits = tensor.shape == shape
            expect(fits, op, "folder", f"{key}.lora_{part} of shape {shape}", tuple(tensor.shape))
        a, b = a.view(E, rank, D), b.view(N, rank, E).permute(2, 0, 1)
        read[name] = (b.transpose(1, 2), a.transpose(1, 2)) if target.swapped else (a, b)
    return read
