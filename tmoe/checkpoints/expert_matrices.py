"""The experts' weights in an unquantised checkpoint, by their names: which matrix is which.

Two layouts are known. A file per linear: ``….experts.3.gate_proj.weight`` (or ``w1``, ``w3``,
``w2`` for gate, up, down). Or a tensor for all experts: ``….experts.gate_up_proj`` (E, 2I, H) with
``….experts.down_proj`` (E, H, I), or both transposed (Llama 4), which their shapes tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..checks import expect
from .header import TensorInfo
from .json_files import some
from .write_shard import read_tensor
from .written import OP

_PER_EXPERT = re.compile(r"((?:.*\.)?experts)\.(\d+)\.(\w+)\.weight$")
_FUSED = re.compile(r"((?:.*\.)?experts)\.(gate_up_proj|down_proj)$")
ROLES = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weight (N, K) of one projection of one expert."""

    linear: str  # what the linear is called where each has a name
    source: TensorInfo
    shape: tuple[int, int]
    expert: int | None = None  # its place in a tensor of all experts
    half: int | None = None  # which half of the rows of gate and up together
    transposed: bool = False

    def read(self) -> Tensor:
        matrix = read_tensor(self.source, self.expert)
        if self.transposed:
            matrix = matrix.t()
        return matrix if self.half is None else matrix.chunk(2, 0)[self.half]


@dataclass(slots=True)
class ExpertLayer:
    """The experts of one layer: for each its matrices by role, "gate", "up" and "down"; or
    "gate_up" and "down", if they are `joined`."""

    name: str  # ends with "experts"
    fused: bool
    transposed: bool = False
    experts: dict[int, dict[str, Matrix]] = field(default_factory=dict)

    def joined(self) -> ExpertLayer:
        """The same with gate and up as the one matrix that a tensor of all experts has."""
        experts = {}
        for e, roles in self.experts.items():
            (I, H), name = roles["gate"].shape, f"{self.name}.gate_up_proj"
            gate_up = replace(roles["gate"], linear=name, shape=(2 * I, H), half=None)
            down = replace(roles["down"], linear=f"{self.name}.down_proj")
            experts[e] = {"gate_up": gate_up, "down": down}
        return ExpertLayer(self.name, True, self.transposed, experts)

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {m.source.dtype for roles in self.experts.values() for m in roles.values()}


def expert_layers(infos: Mapping[str, TensorInfo]) -> dict[str, ExpertLayer]:
    """The layers with experts among the tensors of a checkpoint, by name.

    Raises:
        ValueError: an expert lacks a projection, or its matrices don't fit each other; the message
            names the file and the tensor.
    """
    layers: dict[str, ExpertLayer] = {}
    for name, info in infos.items():
        if (found := _PER_EXPERT.fullmatch(name)) and found[3] in ROLES:
            layer = layers.setdefault(found[1], ExpertLayer(found[1], fused=False))
            expect(len(info.shape) == 2, OP, str(info), "a matrix", info.words)
            matrix = Matrix(name.removesuffix(".weight"), info, (info.shape[0], info.shape[1]))
            layer.experts.setdefault(int(found[2]), {})[ROLES[found[3]]] = matrix
    for layer in layers.values():
        _check(layer)
    for name in infos:
        if (found := _FUSED.fullmatch(name)) and found[1] not in layers:
            layers[found[1]] = _fused(found[1], infos)
    return layers


def _check(layer: ExpertLayer) -> None:
    """Every expert has the same roles and the same shapes as the first one."""
    first = layer.experts[min(layer.experts)]
    for expert, roles in sorted(layer.experts.items()):
        for role in {"up", "down", *first}:
            got = f"only {some(sorted(m.linear for m in roles.values()))}"
            expect(role in roles, OP, f"{layer.name}.{expert}", f"complete with its {role}", got)
    H, I = first["down"].shape
    for roles in layer.experts.values():
        for role, matrix in roles.items():
            wanted = (H, I) if role == "down" else (I, H)
            expect(matrix.shape == wanted, OP, str(matrix.source), f"{wanted}", matrix.shape)


def _fused(name: str, infos: Mapping[str, TensorInfo]) -> ExpertLayer:
    gate_up, down = (infos.get(f"{name}.{part}") for part in ("gate_up_proj", "down_proj"))
    wanted = "beside it gate_up_proj and down_proj"
    both = gate_up is not None and down is not None
    expect(both, OP, name, wanted, some([key for key in infos if key.startswith(f"{name}.")]))
    assert gate_up is not None and down is not None
    shapes = f"gate_up_proj {gate_up.shape}, down_proj {down.shape}"
    fits = len(gate_up.shape) == len(down.shape) == 3 and gate_up.shape[0] == down.shape[0]
    E, rows, columns = gate_up.shape if fits else (0, 0, 0)
    usual = fits and (rows, columns) == (2 * down.shape[2], down.shape[1])
    transposed = fits and (rows, columns) == (down.shape[2], 2 * down.shape[1])
    wanted = "(E, 2I, H) and (E, H, I), or (E, H, 2I) and (E, I, H)"
    expect(usual or transposed, OP, f"{gate_up}", wanted, shapes)
    H, I = down.shape[1:] if usual else (down.shape[2], down.shape[1])
    layer = ExpertLayer(name, fused=True, transposed=transposed)
    for e in range(E):
        linear = f"{name}.{e}"
        layer.experts[e] = {
            "gate": Matrix(f"{linear}.gate_proj", gate_up, (I, H), e, 0, transposed),
            "up": Matrix(f"{linear}.up_proj", gate_up, (I, H), e, 1, transposed),
            "down": Matrix(f"{linear}.down_proj", down, (H, I), e, None, transposed),
        }
    return layer
