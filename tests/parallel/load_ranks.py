"""Checkpoints of which each rank reads its share; each function runs on every rank."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tmoe
from tests.integrations.families import FAMILIES
from tests.integrations.family import DEVICE
from tests.parallel.cases import Case, mesh_of
from tests.parallel.model_ranks import prompt
from tmoe.checkpoints import Checkpoint, checkpoint, quantize_checkpoint
from tmoe.parallel import from_pretrained, parallelize

E, H, I = 8, 128, 256  # an expert takes many pages of a file


def save(name: str, scheme: str | None, path: Path) -> None:
    """A tiny model of a family, as transformers and tmoe write one."""
    family = next(family for family in FAMILIES if family.name == name)
    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), I)
    known = getattr(family_config(family), "__dataclass_fields__", sizes)
    sizes = {key: value for key, value in sizes.items() if key in known} | {"hidden_size": H}
    model: Any = replace(family, overrides=family.overrides | sizes).build()
    plain = path if scheme is None else path.with_name(f"{path.name}-plain")
    model.save_pretrained(plain)
    if scheme is not None:
        own = "gpt-oss" if name == "gpt_oss" else None
        quantize_checkpoint(plain, path, scheme, format=own)


def family_config(family: Any) -> Any:
    import transformers

    return getattr(transformers, family.cls).config_class


def world() -> Any:
    return mesh_of(Case("", (dist.get_world_size(),), ("x",), ()))


def parts(tensor: Tensor) -> list[Tensor]:
    tensor = tensor.detach()
    whole = tensor.parts() if isinstance(tensor, tmoe.QuantizedTensor) else [tensor]
    return [part.contiguous().view(torch.uint8) for part in whole]


class BytesRead(TorchDispatchMode):
    """Counts what is copied out of a checkpoint's files."""

    def __init__(self) -> None:
        super().__init__()
        self.files: set[int] = set()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if type(t) is Tensor]
        if not any(self._is_of_file(tensor) for tensor in made):  # no view
            for tensor in tree_leaves((args, kwargs)):
                if type(tensor) is Tensor and self._is_of_file(tensor):
                    some = func is torch.ops.aten.index.Tensor  # of the experts
                    self.total += made[0].nbytes if some else tensor.nbytes
        return result

    def _is_of_file(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.files


@torch.no_grad()
def load(rank: int, path: str, spread: dict[str, Any]) -> dict[str, Any]:
    """Bit by bit what dividing the whole model gives, and what was read of the files."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # a mode is of one thread
    count, pages = BytesRead(), checkpoint._pages

    def counted(file: Path) -> Tensor:
        found = pages(file)
        count.files.add(found.untyped_storage().data_ptr())
        return found

    checkpoint._pages = counted
    try:
        with count:
            model = from_pretrained(path, world(), dtype=torch.float32, device=DEVICE, **spread)
    finally:
        checkpoint._pages = pages
    whole = tmoe.from_pretrained(path, dtype=torch.float32, device=DEVICE)
    logits = whole(prompt()).logits
    experts = sum(t.nbytes for n, t in whole.state_dict().items() if ".experts." in n)
    torch.testing.assert_close(model(prompt()).logits, logits)
    parallelize(whole, world(), **spread)
    state, want = model.state_dict(), whole.state_dict()
    assert list(state) == list(want)
    for name, tensor in want.items():
        assert state[name].shape == tensor.shape and state[name].dtype == tensor.dtype, name
        for mine, its in zip(parts(state[name]), parts(tensor), strict=True):
            assert torch.equal(mine, its), name
            assert mine.untyped_storage().nbytes() == mine.nbytes
    files = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    return {"read": count.total, "files": files, "experts": experts}


def refused(rank: int, path: str, spread: dict[str, Any]) -> str:
    """Before a tensor is read."""
    looked, view = [], Checkpoint.view
    Checkpoint.view = lambda self, name: (looked.append(name), view(self, name))[1]
    try:
        from_pretrained(path, world(), **spread)
        return "no error"
    except ValueError as error:
        assert not looked, looked
        return str(error)
    finally:
        Checkpoint.view = view


def without(path: str, out: Path, tensor: str) -> str:
    """A copy of a checkpoint that lacks a tensor."""
    shutil.copytree(path, out)
    (file,) = out.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[tensor]
    save_file(tensors, file, metadata={"format": "pt"})
    return str(out)
