"""How large the inputs of experts' projections get: what static scales are made from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..checks import expect, expect_type

_PARTS = ("input_amax", "hidden_amax")


@dataclass(frozen=True)
class InputRanges:
    """The largest magnitude of each expert's inputs, of both projections, layer by layer.

    Attributes:
        layers: by the layer's name in a checkpoint (``….experts``): of the first projection's
            inputs and of the second one's, (E,) fp32 each.
    """

    layers: Mapping[str, tuple[Tensor, Tensor]]

    def of(self, layer: str, expert: int, role: str) -> float:
        """The largest input of a projection, "gate", "up", "gate_up" or "down"."""
        return float(self.layers[layer][role == "down"][expert])

    def check(self, experts: Mapping[str, int], op: str) -> None:
        """Raise ``ValueError`` unless each of these layers is there, with so many experts."""
        for layer, E in experts.items():
            known = ", ".join(list(self.layers)[:4]) or "nothing"
            expect(layer in self.layers, op, "input_ranges", f"of {layer} too", f"of {known}, ...")
            for name, amax in zip(_PARTS, self.layers[layer], strict=True):
                arg = f"{layer}.{name} of input_ranges"
                expect(amax.shape == (E,), op, arg, f"of shape ({E},)", tuple(amax.shape))
                usable = bool((torch.isfinite(amax) & (amax >= 0)).all())
                expect(usable, op, arg, "finite and at least 0", amax.tolist())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them to a safetensors file."""
        save_file(self._flat(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> InputRanges:
        """What `save` wrote. Raises ``ValueError`` if it is another file."""
        op = "InputRanges.load"
        expect_type(path, (str, os.PathLike), op, "path")
        if not Path(path).is_file():
            raise FileNotFoundError(f"{op}: path must be a file, got {path}")
        flat = load_file(path)
        names = sorted({name.rpartition(".")[0] for name in flat})
        ours = {f"{layer}.{part}" for layer in names for part in _PARTS}
        is_ours = bool(flat) and set(flat) == ours
        expect(is_ours, op, str(path), "a file that InputRanges wrote", ", ".join(list(flat)[:4]))
        return cls({n: (flat[f"{n}.{_PARTS[0]}"], flat[f"{n}.{_PARTS[1]}"]) for n in names})

    @property
    def digest(self) -> str:
        """A hash of all values."""
        found = hashlib.sha256()
        for name, tensor in sorted(self._flat().items()):
            found.update(name.encode() + tensor.numpy().tobytes())
        return found.hexdigest()

    def _flat(self) -> dict[str, Tensor]:
        return {
            f"{layer}.{part}": amax.detach().float().cpu().contiguous()
            for layer, both in self.layers.items()
            for part, amax in zip(_PARTS, both, strict=True)
        }
