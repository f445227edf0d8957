"""The header of a safetensors file: which tensors it holds, of what kind, and where.

A file is 8 bytes with the header's length, the header in JSON, and the tensors without gaps. All of
that can be checked before a tensor is read, so a file that was cut off is found when it is opened.
Source: the format's description at https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import torch

OP = "Checkpoint"
# What safetensors calls a dtype, and bits per element. F4 tensors are kept as bytes of two codes.
DTYPES: dict[str, tuple[torch.dtype, int]] = {
    "F64": (torch.float64, 64),
    "F32": (torch.float32, 32),
    "F16": (torch.float16, 16),
    "BF16": (torch.bfloat16, 16),
    "I64": (torch.int64, 64),
    "I32": (torch.int32, 32),
    "I16": (torch.int16, 16),
    "I8": (torch.int8, 8),
    "U64": (torch.uint64, 64),
    "U32": (torch.uint32, 32),
    "U16": (torch.uint16, 16),
    "U8": (torch.uint8, 8),
    "BOOL": (torch.bool, 8),
    "C64": (torch.complex64, 64),
    "F8_E4M3": (torch.float8_e4m3fn, 8),
    "F8_E4M3FNUZ": (torch.float8_e4m3fnuz, 8),
    "F8_E5M2": (torch.float8_e5m2, 8),
    "F8_E5M2FNUZ": (torch.float8_e5m2fnuz, 8),
    "F8_E8M0": (torch.float8_e8m0fnu, 8),
    "F4": (torch.uint8, 4),
}
_LFS = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a checkpoint, as its file's header describes it."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # its first byte in the file
    end: int  # the byte after its last

    def __str__(self) -> str:
        return f"{self.file.name}: {self.name}"

    @property
    def words(self) -> str:
        """Dtype and shape, for errors."""
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, by name.

    Raises:
        FileNotFoundError: there is no such file, or it is a link to nowhere.
        ValueError: it isn't a whole safetensors file; the message has the bytes wanted and got.
    """
    size = _size(path)
    if size < 8:
        _bad(path, "a safetensors file of at least 8 bytes", f"{size} bytes")
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if first == _LFS[:8] and file.read(len(_LFS) - 8) == _LFS[8:]:
            _bad(path, "a safetensors file", "a pointer of Git LFS; `git lfs pull` gets the file")
        if 8 + length > size:
            wanted = f"at least {8 + length} bytes, as its first 8 say"
            _bad(path, wanted, f"{size} bytes: cut off, or not a safetensors file")
        text = file.read(length)
    try:
        header = json.loads(text.decode())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        _bad(path, "a safetensors file with a header in JSON", str(error))
    if not isinstance(header, dict):
        _bad(path, "a safetensors file with an object as header", type(header).__name__)
    header.pop("__metadata__", None)
    infos = {name: _info(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_extent(path, infos, 8 + length, size)
    return infos


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        got = f"a link to {path.readlink()}, which isn't there" if path.is_symlink() else "nothing"
        raise FileNotFoundError(f"{OP}: {path} must be a safetensors file, got {got}") from None


def _info(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    tensor = f"{path.name}: {name}"
    wanted = "described by dtype, shape and data_offsets"
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"{OP}: {tensor} must be {wanted}, got {entry}")
    if dtype not in DTYPES:
        raise ValueError(f"{OP}: {tensor} must be of a dtype of {', '.join(DTYPES)}, got {dtype}")
    kind, bits = DTYPES[dtype]
    begin, end = offsets
    if math.prod(shape) * bits != 8 * (end - begin):
        size = f"{math.prod(shape) * bits / 8:g} bytes, as {dtype} {tuple(shape)} takes"
        raise ValueError(f"{OP}: {tensor} must have {size}, got {end - begin}")
    if bits == 4:  # two codes a byte
        shape = [*shape[:-1], shape[-1] // 2]
    return TensorInfo(name, path, kind, tuple(shape), start + begin, start + end)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_extent(path: Path, infos: dict[str, TensorInfo], start: int, size: int) -> None:
    """Raise unless the tensors fill the file from `start` to its end, one after the other."""
    end = start
    for info in sorted(infos.values(), key=lambda info: (info.begin, info.end)):
        if info.begin != end:
            raise ValueError(f"{OP}: {info} must start at byte {end}, got {info.begin}")
        end = info.end
    if size != end:
        got = f"{size}: cut off" if size < end else f"{size}"
        _bad(path, f"{end} bytes, as its header says", got)


def _bad(path: Path, wanted: str, got: str) -> NoReturn:
    raise ValueError(f"{OP}: {path.name} must be {wanted}, got {got}")
