"""Tiny checkpoints on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

E, H, I = 3, 256, 128
PREFIX = "model.layers.0.mlp.experts"
QWEN, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def write(folder: Path, tensors: dict[str, Tensor], config: Any = None, shards: int = 1) -> Path:
    """A folder as transformers has them: config.json, and one file or several with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def matrices(
    names: tuple[str, ...] = QWEN, E: int = E, H: int = H, I: int = I
) -> dict[str, Tensor]:
    """Experts' weights by layer; each of another size, so that mixed-up scales show."""
    result = {}
    for e in range(E):
        for i, name in enumerate(names):
            shape = (H, I) if name == names[-1] else (I, H)
            result[f"{PREFIX}.{e}.{name}"] = torch.randn(shape) * 2.0 ** (e - i)
    return result


def stored(kind: Any, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a checkpoint of that kind, and what each layer means."""
    tensors, truths = {}, {}
    for number, (layer, w) in enumerate(weights.items(), 1):
        parts = kind.store(w)
        truths[layer] = kind.truth(parts)
        if kind.static:
            name, divides = kind.static
            scale = torch.tensor([number / 64])
            parts[name] = 1 / scale if divides else scale
        tensors |= {f"{layer}.{name}": part for name, part in parts.items()}
    return tensors, truths
