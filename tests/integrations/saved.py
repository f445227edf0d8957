"""Tiny quantised checkpoints of whole models, and the same models with dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.checkpoints.kinds import Kind
from tests.checkpoints.writing import write
from tests.integrations.family import Family

INPUT_SCALE = 0.02


def is_linear(name: str, w: Tensor) -> bool:
    """What quantisers of linear layers take: no router, embedding or head."""
    of_layer = ".experts." in name or "_proj." in name
    return of_layer and name.endswith(".weight") and w.ndim == 2 and min(w.shape) >= 16


def taken_apart(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """The tensors with each stacked ``experts.gate_up_proj`` and ``down_proj`` as linear layers,
    which llm-compressor makes of them; and by prefix whether the stacked ones are transposed.
    Experts with biases stay as they are."""
    result, stacked = dict(tensors), {}
    for name in tensors:
        prefix, _, last = name.rpartition(".")
        named = last == "gate_up_proj" and prefix.endswith(".experts")
        if not named or f"{name}_bias" in tensors:
            continue
        gate_up, down = result.pop(name), result.pop(f"{prefix}.down_proj")
        stacked[prefix] = transposed = gate_up.shape[1] != 2 * down.shape[2]
        if transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        gate, up = gate_up.chunk(2, 1)
        for role, weights in (("gate", gate), ("up", up), ("down", down)):
            for e, w in enumerate(weights):
                result[f"{prefix}.{e}.{role}_proj.weight"] = w.contiguous()
    return result, stacked


def put_together(tensors: dict[str, Tensor], stacked: dict[str, bool]) -> dict[str, Tensor]:
    """What `taken_apart` took apart, stacked again."""
    result = dict(tensors)
    for prefix, transposed in stacked.items():
        E = sum(n.startswith(f"{prefix}.") and n.endswith(".down_proj.weight") for n in result)
        gate, up, down = (
            torch.stack([result.pop(f"{prefix}.{e}.{role}_proj.weight") for e in range(E)])
            for role in ("gate", "up", "down")
        )
        for name, w in (("gate_up_proj", torch.cat([gate, up], 1)), ("down_proj", down)):
            result[f"{prefix}.{name}"] = w.transpose(1, 2) if transposed else w
    return result


def save(
    family: Family,
    kind: Kind,
    folder: Path,
    *,
    which: Callable[[str, Tensor], bool] = is_linear,
    shards: int = 1,
    edit: Callable[[dict[str, Tensor]], Any] | None = None,
    kind_of: Callable[[str], Kind] | None = None,
) -> tuple[Path, nn.Module]:
    """Write a random model of the family with its linear layers quantised, in the names of the
    original checkpoint; returns the folder, and the model with the weights that they stand for.
    Stacked experts are linear layers there (`taken_apart`).

    `edit` changes the tensors before they are written; `kind_of` gives layers kinds of their own.
    """
    folder.mkdir(exist_ok=True)
    model = family.build().cpu()
    model.save_pretrained(folder / "plain")
    config = json.loads((folder / "plain" / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    whole = load_file(folder / "plain" / "model.safetensors")
    linears, stacked = taken_apart(whole)
    for name, w in linears.items():
        if not which(name, w):
            tensors[name] = plain[name] = w
            continue
        this = kind_of(name) if kind_of else kind
        parts = this.store(w)
        plain[name] = this.truth(parts)
        if kind.static:
            scale = torch.tensor(INPUT_SCALE)
            parts[kind.static[0]] = 1 / scale if kind.static[1] else scale
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
    if edit is not None:
        edit(tensors)
    write(folder / "plain", put_together(plain, stacked), config)
    reference = type(model).from_pretrained(folder / "plain", dtype=torch.float32)
    config["quantization_config"] = kind.config
    return write(folder / "quantized", tensors, config, shards), reference
