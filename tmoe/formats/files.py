"""Dicts of tensors, quantised ones among them, as safetensors files.

A `QuantizedTensor` named ``w`` becomes the entries ``w`` (codes), ``w.scale`` and, if it has one,
``w.global_scale``. What they mean is in the file's metadata, so nothing is guessed on the way back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file as save_safetensors
from torch import Tensor

from ..checks import expect, expect_tensor
from .format import FORMATS
from .quantized_tensor import FLOATS, QuantizedTensor

METADATA_KEY = "tmoe.formats"
_SUFFIXES = ("", ".scale", ".global_scale")


def save_file(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors, a state dict for example, to `path`.

    Raises:
        TypeError, ValueError: a value that isn't a tensor, or a name that a quantised tensor's
            part needs.
    """
    op = "save_file"
    flat: dict[str, Tensor] = {}
    descriptions = {}
    for name, tensor in tensors.items():
        expect_tensor(tensor, op, name)
        entries = {name: tensor}
        if isinstance(tensor, QuantizedTensor):
            entries = _entries(name, tensor)
            descriptions[name] = _describe(tensor)
        for key, part in entries.items():
            taken = key in flat or (key != name and key in tensors)
            expect(not taken, op, "tensors", f"free of {key!r}, a part of {name!r}", "both")
            flat[key] = part.detach().contiguous()
    own = {METADATA_KEY: json.dumps(descriptions)} if descriptions else {}
    clash = METADATA_KEY in (metadata or {})
    expect(not clash, op, "metadata", f"free of {METADATA_KEY!r}", "that key")
    save_safetensors(flat, path, metadata={**(metadata or {}), **own} or None)


def load_file(
    path: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """What `save_file` wrote, restored exactly; any other safetensors file as it is.

    Raises:
        RuntimeError: an entry that a quantised tensor needs is missing or doesn't fit; its key is
            in the message.
    """
    with safe_open(path, framework="pt", device=str(device)) as file:
        descriptions = json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
        flat = {key: file.get_tensor(key) for key in file.keys()}
    restored = {name: _restore(flat, name, about, path) for name, about in descriptions.items()}
    return {**flat, **restored}


def _entries(name: str, q: QuantizedTensor) -> dict[str, Tensor]:
    return {name + suffix: part for suffix, part in zip(_SUFFIXES, q.parts(), strict=False)}


def _describe(q: QuantizedTensor) -> dict[str, Any]:
    return {
        "format": q.format,
        "block_shape": q.block_shape,
        "shape": tuple(q.shape),
        "dtype": str(q.dtype).removeprefix("torch."),
    }


def _restore(
    flat: dict[str, Tensor], name: str, about: dict[str, Any], path: str | os.PathLike[str]
) -> QuantizedTensor:
    """Take a quantised tensor's entries out of `flat`."""

    def check(ok: bool, what: str) -> None:
        if not ok:
            raise RuntimeError(f"load_file: {path}: {what}")

    check(about["format"] in FORMATS, f"{name!r} has the unknown format {about['format']!r}")
    format, shape = FORMATS[about["format"]], tuple(about["shape"])
    block_shape = format.check_block_shape(about["block_shape"], "load_file")
    wanted: list[tuple[torch.dtype, tuple[tuple[int, ...], ...]]] = [
        (format.element.storage, (format.data_shape(shape),)),
        (format.scale.storage, format.scale_shapes(shape, block_shape)),
    ]
    if format.has_global_scale:
        wanted.append((torch.float32, format.global_scale_shapes(shape)))
    parts = []
    for suffix, (dtype, shapes) in zip(_SUFFIXES, wanted, strict=False):
        key = name + suffix
        check(key in flat, f"{key!r} is missing: {name!r} is {format.name} and needs it")
        part = flat.pop(key)
        fits = part.dtype == dtype and tuple(part.shape) in shapes
        is_what = f"{key!r} is {part.dtype} {tuple(part.shape)}"
        check(
            fits, f"{is_what}, {format.name} {shape} needs {dtype} {' or '.join(map(str, shapes))}"
        )
        parts.append(part)
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
    check(about["dtype"] in dtypes, f"{name!r} has the unknown dtype {about['dtype']!r}")
    data, scale, *rest = parts
    global_scale = rest[0] if rest else None
    return QuantizedTensor(
        data, scale, global_scale, format.name, block_shape, shape, dtypes[about["dtype"]]
    )
