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

    `edit` changes the tensors before they are written; `kind_of` gives layers kinds of their own.
    """
    folder.mkdir(exist_ok=True)
    model = family.build().cpu()
    model.save_pretrained(folder / "plain")
    config = json.loads((folder / "plain" / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, w in load_file(folder / "plain" / "model.safetensors").items():
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
    write(folder / "plain", plain, config)
    reference = type(model).from_pretrained(folder / "plain", dtype=torch.float32)
    config["quantization_config"] = kind.config
    return write(folder / "quantized", tensors, config, shards), reference
