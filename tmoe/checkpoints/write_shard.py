"""Write a safetensors file tensor by tensor: none but the one at hand is in memory.

The header comes first in such a file, so all names, dtypes and shapes are stated before. The file
has another name until it is complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..whole_file import whole_file
from .header import DTYPES, TensorInfo

_NAMES = {dtype: name for name, (dtype, bits) in reversed(DTYPES.items()) if bits != 4}
_CHUNK = 16 * 2**20  # bytes copied at a time

Described = tuple[torch.dtype, tuple[int, ...]]


class ShardWriter:
    """``with ShardWriter(path, described) as shard: shard.write(name, tensor); ...``

    The file appears under its name when the block ends, with all of its bytes on the disk; if it
    ends by an exception, nothing is left.
    """

    def __init__(
        self,
        path: Path,
        described: Mapping[str, Described],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            path: where the file will be.
            described: dtype and shape of every tensor, by name.
            metadata: kept in the file's header.
        """
        self.path, self._described = path, dict(described)
        self._begin: dict[str, int] = {}
        self._missing = {name: math.prod(shape) for name, (_, shape) in described.items()}
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        # Wide elements first, as safetensors does it: then each one starts at a multiple of itself.
        for name, (dtype, shape) in sorted(
            described.items(), key=lambda entry: -entry[1][0].itemsize
        ):
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            self._begin[name] = begin
            header[name] = {
                "dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]
            }  # fmt: skip
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self._size = len(self._head) + end
        self._open = ExitStack()

    def __enter__(self) -> ShardWriter:
        self._file = self._open.enter_context(whole_file(self.path))
        self._open.push(self._expect_all)
        self._file.write(self._head)
        self._file.truncate(self._size)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._open.__exit__(*raised)

    def _expect_all(self, kind: object, error: BaseException | None, trace: object) -> None:
        """An exception here keeps the file from taking its name."""
        missing = [name for name, count in self._missing.items() if count]
        assert error or not missing, f"{self.path.name}: not written: {missing[:8]}"

    def write(self, name: str, tensor: Tensor, index: int | None = None) -> None:
        """Write a tensor, which is what was described, or its slice `index` along the first
        dimension."""
        dtype, shape = self._described[name]
        shape = shape if index is None else shape[1:]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), (name, tensor.shape, shape)
        self._to(name, tensor.numel(), index or 0)
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        self._file.write(flat.numpy().data)

    def copy(self, info: TensorInfo) -> None:
        """Write the bytes of a tensor in another file."""
        self._to(info.name, math.prod(info.shape))
        left = info.end - info.begin
        with info.file.open("rb") as source:
            source.seek(info.begin)
            while left:
                chunk = source.read(min(left, _CHUNK))
                if not chunk:
                    raise ValueError(
                        f"quantize_checkpoint: {info} must have {info.end - info.begin} bytes, got "
                        f"{info.end - info.begin - left}: the file was cut off meanwhile"
                    )
                self._file.write(chunk)
                left -= len(chunk)

    def _to(self, name: str, count: int, index: int = 0) -> None:
        """Go to where the next `count` elements of a tensor belong, after `index` such slices."""
        assert self._missing[name] >= count, f"{name} is written twice"
        self._missing[name] -= count
        begin = self._begin[name] + index * count * self._described[name][0].itemsize
        self._file.seek(len(self._head) + begin)


def read_tensor(info: TensorInfo, index: int | None = None) -> Tensor:
    """A tensor of a safetensors file, or one of its slices along the first dimension, in memory."""
    begin, size, shape = info.begin, info.end - info.begin, info.shape
    if index is not None:
        size //= shape[0]
        begin, shape = begin + index * size, shape[1:]
    buffer = bytearray(size)
    with info.file.open("rb") as file:
        file.seek(begin)
        got = file.readinto(buffer)
    if got != size:
        raise ValueError(
            f"quantize_checkpoint: {info} must have {size} bytes at byte {begin}, got {got}: "
            "the file was cut off meanwhile"
        )
    if not size:
        return torch.empty(shape, dtype=info.dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(info.dtype).view(shape)
