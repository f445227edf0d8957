"""`Checkpoint`: a folder of safetensors files, opened without reading a tensor."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..checks import expect, expect_type
from .header import OP, TensorInfo, read_header
from .json_files import read_json, some
from .methods import describe
from .quantization import Quantization

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Checkpoint:
    """The tensors of a model on disk, and what its configuration says about their number formats.

    Opening reads the configuration and the header of every file, and no tensor. Names, dtypes,
    shapes and the files' lengths are checked then, so what is cut off, missing or superfluous is
    found before anything is loaded. Tensors are read straight from the files, when asked for.

    Attributes:
        path: the folder, or the one file.
        config: what config.json says; empty where there is none.
        quantization: a `Quantization`; None where the configuration describes none.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """
        Args:
            path: a folder with `model.safetensors`, or with `model.safetensors.index.json` and the
                files that it names; or one safetensors file, next to its config.json if there is
                one.

        Raises:
            FileNotFoundError: the path, or a file that the index names, isn't there.
            ValueError: a file isn't a whole safetensors file, the index and the files disagree, or
                the weights are quantised in a way that tmoe doesn't know. The message names the
                file, the tensor if it is one's, what was wanted and what came.
        """
        expect_type(path, (str, os.PathLike), OP, "path")
        self.path = Path(path)
        folder = self.path if self.path.is_dir() else self.path.parent
        self.config = read_json(folder / "config.json")
        self.quantization: Quantization | None = describe(self.config, folder)
        self._infos = self._read_headers()
        self._maps: dict[Path, Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors."""
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def info(self, name: str) -> TensorInfo:
        """File, dtype and shape of a tensor. Raises ``ValueError`` where there is none."""
        if name not in self._infos:
            near = [other for other in self._infos if other.startswith(name.rpartition(".")[0])]
            beside = f"; beside it are {some(near)}" if near else ""
            raise ValueError(f"{OP}: {self.path} must have a tensor {name}, got none{beside}")
        return self._infos[name]

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """Read one tensor. Packed 4-bit codes come as bytes."""
        view = self.view(name)
        return view.to(device) if torch.device(device).type != "cpu" else view.clone()

    def view(self, name: str) -> Tensor:
        """The tensor in the file's pages, not copied: to be read, not written, and not to be kept
        where the file may change. Bytes that are never looked at are never read."""
        info = self.info(name)
        if info.begin == info.end:
            return torch.empty(info.shape, dtype=info.dtype)
        if info.file not in self._maps:
            self._maps[info.file] = _pages(info.file)
        pages = self._maps[info.file]
        expect(info.end <= len(pages), OP, str(info.file), f"{info.end} bytes", len(pages))
        raw = pages[info.begin : info.end]
        if info.begin % info.dtype.itemsize:
            raw = raw.clone()  # a header of odd length
        return raw.view(info.dtype).view(info.shape)

    def close(self) -> None:
        """Let go of the files. They are opened again where that is needed."""
        self._maps.clear()

    def __repr__(self) -> str:
        method = self.quantization.method if self.quantization else "not quantised"
        files = len({info.file for info in self._infos.values()})
        return f"Checkpoint({str(self.path)!r}: {len(self)} tensors in {files} files, {method})"

    def _read_headers(self) -> dict[str, TensorInfo]:
        if not self.path.is_dir():
            return read_header(self.path)
        index = self.path / INDEX
        if not index.exists() and not index.is_symlink():
            if not (single := self.path / SINGLE).exists() and not single.is_symlink():
                found = some(sorted(file.name for file in self.path.iterdir())) or "an empty folder"
                wanted = f"{SINGLE} or {INDEX}"
                raise FileNotFoundError(f"{OP}: {self.path} must have {wanted}, got {found}")
            return read_header(single)
        return self._read_shards(index)

    def _read_shards(self, index: Path) -> dict[str, TensorInfo]:
        weight_map = read_json(index).get("weight_map")
        ok = isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values())
        expect(ok, OP, INDEX, "an object with a weight_map of names to files", weight_map)
        assert isinstance(weight_map, dict)
        infos: dict[str, TensorInfo] = {}
        for file in sorted(set(weight_map.values())):
            expect(Path(file).name == file, OP, INDEX, "names of files beside it", repr(file))
            held = read_header(self.path / file)
            listed = {name for name, where in weight_map.items() if where == file}
            absent, unlisted = sorted(listed - set(held)), sorted(set(held) - listed)
            wanted = "a file with the tensors that the index lists for it"
            expect(not absent, OP, file, wanted, f"none named {some(absent)}")
            expect(not unlisted, OP, INDEX, f"a list of all tensors of {file}", some(unlisted))
            infos |= held
        return infos


def _pages(file: Path) -> Tensor:
    """The bytes of a file. Mapped for reading alone, they count as nobody's memory, whatever the
    size; a mapping that could be written, as `torch.from_file` makes, has to fit into it."""
    with file.open("rb") as opened:
        buffer = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=torch.uint8)
