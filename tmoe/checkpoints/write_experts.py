"""Quantise the experts that stand in one file, and write them as a checkpoint format has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import expect
from ..formats import ErrorSums, QuantizedTensor
from ..formats.by_expert import quantize_matrix, why_not_quantize
from .expert_matrices import ExpertLayer, Matrix
from .header import TensorInfo
from .write_formats import OP, Written
from .write_shard import Described, ShardWriter

Made = dict[str, tuple[QuantizedTensor, ErrorSums]]  # by role
Errors = dict[str, dict[str, ErrorSums]]  # by layer and role


def why_not_write(layer: ExpertLayer, written: Written, names: Mapping[str, object]) -> str | None:
    """Why the layer can't be stored in the format, with the numbers, or None."""
    form, (rows, columns) = written.recipe.format, written.recipe.block_shape
    stays_fused = layer.fused and written.method == "deepseek"
    if layer.fused and f"{layer.name}.gate_up_proj_bias" in names:
        return "its experts have biases in tensors of all experts, and gate and up may interleave"
    if stays_fused and layer.transposed:
        return "deepseek's tensors of all experts are (E, N, K), these are transposed"
    if layer.fused and layer.transposed and written.method == "modelopt":
        return "modelopt has a layout of its own for transposed experts; use compressed-tensors"
    for role, matrix in layer.experts[min(layer.experts)].items():
        N, K = matrix.shape
        for dtype in layer.dtypes:
            if reason := why_not_quantize((N, K), dtype, form):
                return f"{role}: {reason}"
        if columns is not None and K % columns:
            return f"{role} is {N} x {K}, and {K} is no multiple of {columns}"
        if rows not in (None, 1) and N % rows:
            return f"{role} is {N} x {K}, and {N} is no multiple of {rows}"
    return None


@dataclass(frozen=True, slots=True)
class _Output:
    """What becomes of one expert's part of a source tensor."""

    expert: int
    roles: tuple[str, ...]  # one, or gate and up together
    names: dict[str, str]  # by the part's name below a linear
    index: int | None  # the slice of those tensors that it fills


class ExpertsWriter:
    """Writes the experts of `layers`, wherever their tensors stand."""

    def __init__(self, layers: Sequence[ExpertLayer], written: Written, device: torch.device):
        self.written, self.device = written, device
        self._of: dict[str, ExpertLayer] = {}
        self._outputs: dict[str, list[_Output]] = {}  # by source tensor
        for layer in layers:
            for expert, roles in layer.experts.items():
                for name in dict.fromkeys(matrix.source.name for matrix in roles.values()):
                    self._of[name] = layer
                    outputs = self._outputs.setdefault(name, [])
                    outputs += _outputs(layer, name, expert, written)
        self._last: tuple[tuple[str, int, str] | None, Made] = (None, {})

    def __contains__(self, source: str) -> bool:
        return source in self._of

    def describe(self, info: TensorInfo) -> dict[str, Described]:
        """What is written in place of a source tensor."""
        described: dict[str, Described] = {}
        layer = self._of[info.name]
        for output in self._outputs[info.name]:
            N, K = layer.experts[output.expert][output.roles[0]].shape
            matrix = self.written.describe((N * len(output.roles), K))
            lead = () if output.index is None else (len(layer.experts),)
            for part, (dtype, shape) in matrix.items():
                described[output.names[part]] = (dtype, (*lead, *shape))
        return described

    def write(self, info: TensorInfo, shard: ShardWriter) -> Errors:
        """Write it; returns the errors that this made."""
        layer = self._of[info.name]
        errors = dict.fromkeys(("gate", "up", "down"), ErrorSums())
        for output in self._outputs[info.name]:
            each = [self._quantized(layer, output.expert, role) for role in output.roles]
            parts = [self.written.parts(q) for q, _ in each]
            for part, name in output.names.items():
                shard.write(name, _stack_rows([p[part] for p in parts]), output.index)
            for role, (_, error) in zip(output.roles, each, strict=True):
                errors[role] += error
        return {layer.name: {role: error for role, error in errors.items() if error.signal}}

    def _quantized(
        self, layer: ExpertLayer, expert: int, role: str
    ) -> tuple[QuantizedTensor, ErrorSums]:
        """Gate and up share a scale of the whole matrix, where the format has one: loaders keep
        both in one matrix. So they are made together, and the last pair is kept."""
        roles = layer.experts[expert]
        recipe = self.written.recipe
        one_scale = recipe.format.has_global_scale or recipe.block_shape == (None, None)
        together = one_scale and role != "down" and "gate" in roles
        key = (layer.name, expert, "gate_up" if together else role)
        if self._last[0] != key:
            wanted = ("gate", "up") if together else (role,)
            self._last = (key, self._make({name: roles[name] for name in wanted}))
        return self._last[1][role]

    def _make(self, matrices: dict[str, Matrix]) -> Made:
        values = {role: matrix.read().to(self.device) for role, matrix in matrices.items()}
        for role, x in values.items():
            finite = bool(torch.isfinite(x).all())
            source = matrices[role].source
            expect(finite, OP, f"{source}", "finite everywhere", "NaN or Inf")
        x, recipe = torch.cat(list(values.values())), self.written.recipe
        q, _ = quantize_matrix(x, recipe)
        made, begin = {}, 0
        for role, x in values.items():
            rows = q[begin : begin + len(x)]
            assert isinstance(rows, QuantizedTensor)
            made[role] = (rows, ErrorSums.of(x, rows))
            begin += len(x)
        return made


def _outputs(layer: ExpertLayer, source: str, expert: int, written: Written) -> Iterator[_Output]:
    """What one expert's part of a source tensor becomes."""
    roles = layer.experts[expert]
    here = tuple(role for role, matrix in roles.items() if matrix.source.name == source)
    if layer.fused and written.method == "deepseek":
        names = {part: f"{source}{part.removeprefix('weight')}" for part in written.names}
        yield _Output(expert, here, names, expert)
        return
    for role in here:
        names = {part: f"{roles[role].linear}.{part}" for part in written.names}
        yield _Output(expert, (role,), names, None)


def _stack_rows(parts: list[Tensor]) -> Tensor:
    """torch doesn't join 8-bit floats on every device."""
    if len(parts) == 1:
        return parts[0]
    dtype = parts[0].dtype
    return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
