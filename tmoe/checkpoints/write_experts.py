"""Quantise the experts that stand in one file, and write them as a checkpoint format has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..checks import expect
from ..formats import ErrorSums, QuantizedTensor
from ..formats.by_expert import quantize_matrix, why_not_quantize
from .expert_matrices import ExpertLayer, Matrix
from .header import TensorInfo
from .input_ranges import InputRanges
from .write_shard import Described, ShardWriter
from .written import OP, Written

Made = dict[str, tuple[QuantizedTensor, ErrorSums]]  # by role
Errors = dict[str, dict[str, ErrorSums]]  # by layer and role


def why_not_write(layer: ExpertLayer, written: Written, names: Mapping[str, object]) -> str | None:
    """Why the layer can't be stored in the format, with the numbers, or None."""
    form, (rows, columns) = written.recipe.format, written.recipe.block_shape
    if written.fused and not layer.fused:
        return f"{written.method} has tensors of all experts, here each linear has its own"
    if layer.fused and not written.fused and f"{layer.name}.gate_up_proj_bias" in names:
        return (
            "its experts have biases in tensors of all experts, where gate and up may interleave; "
            "for gpt-oss use mxfp4_a16 in gpt-oss' own format"
        )
    if layer.transposed and written.method == "modelopt":
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


class ExpertsWriter:
    """Writes the experts of `layers`, wherever their tensors stand: each linear by its own name,
    also where the source has tensors of all experts. That is what the formats' exporters write, and
    what their readers expect; but for gpt-oss'."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        written: Written,
        device: torch.device,
        ranges: InputRanges | None = None,
    ) -> None:
        self.written, self.device, self.ranges = written, device, ranges
        self._of: dict[str, ExpertLayer] = {}
        self._within: dict[str, list[tuple[int, str]]] = {}  # source tensor -> experts and roles
        for layer in [layer.joined() for layer in layers] if written.fused else layers:
            for expert, roles in layer.experts.items():
                for role, matrix in roles.items():
                    self._of[matrix.source.name] = layer
                    self._within.setdefault(matrix.source.name, []).append((expert, role))
        self._last: tuple[tuple[str, int, str] | None, Made] = (None, {})

    def __contains__(self, source: str) -> bool:
        return source in self._of

    def describe(self, info: TensorInfo) -> dict[str, Described]:
        """What is written in place of a source tensor."""
        experts = self._of[info.name].experts
        lead = (len(experts),) if self.written.fused else ()
        return {
            self._name(matrix, part): (dtype, (*lead, *shape))
            for matrix in (experts[expert][role] for expert, role in self._within[info.name])
            for part, (dtype, shape) in self.written.describe(matrix.shape).items()
        }

    def write(self, info: TensorInfo, shard: ShardWriter) -> Errors:
        """Write it; returns the errors that this made."""
        layer = self._of[info.name]
        errors: dict[str, ErrorSums] = {}
        for expert, role in self._within[info.name]:
            q, error = self._quantized(layer, expert, role)
            reach = self.ranges.of(layer.name, expert, role) if self.ranges else 0.0
            for part, tensor in self.written.parts(q, reach).items():
                name = self._name(layer.experts[expert][role], part)
                shard.write(name, tensor, expert if self.written.fused else None)
            errors[role] = errors.get(role, ErrorSums()) + error
        return {layer.name: errors}

    def _name(self, matrix: Matrix, part: str) -> str:
        return f"{matrix.linear}{'' if self.written.fused else '.'}{part}"

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
        q = quantize_matrix(x, recipe)
        made, begin = {}, 0
        for role, x in values.items():
            rows = q[begin : begin + len(x)]
            assert isinstance(rows, QuantizedTensor)
            made[role] = (rows, ErrorSums.of(x, rows))
            begin += len(x)
        return made
