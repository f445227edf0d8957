"""The quantised experts of one layer: found and checked first, then read into stacked tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import expect
from ..formats import FORMATS, QuantizedTensor
from ..formats.format import Format
from .checkpoint import Checkpoint
from .names import ROLES
from .quantization import LinearFormat
from .stored import CODES, Parts, Stored

BLOCK = 128  # rows and columns of fp8_block


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The experts of one layer, by their headers.

    Attributes:
        first: for each expert, the matrices of the first projection: one, or gate and up.
        down: for each expert, the one of the second.
        experts: their numbers.
        linear: the format of all of them.
        scheme: of tmoe's, in which they run.
    """

    first: tuple[tuple[Stored, ...], ...]
    down: tuple[Stored, ...]
    experts: Sequence[int]
    linear: LinearFormat
    scheme: str
    op: str

    @classmethod
    def find(
        cls,
        checkpoint: Checkpoint,
        first: Sequence[str],
        down: str,
        experts: range,
        scheme: str | None,
        op: str,
        transposed: bool | None = None,
    ) -> StoredExperts | None:
        """The experts with layers of these names (``{e}`` stands for an expert's number); None if
        they aren't quantised. `transposed`: as for `Stored.find`. Raises ``ValueError`` for what
        doesn't belong together."""
        names = [_names_of(checkpoint, layer.format(e=experts.start)) for layer in (*first, down)]
        if not any("scale" in parts or _has_codes(checkpoint, parts) for parts in names):
            return None
        fused = "{e}" not in down

        def stored(layer: str) -> Callable[[int], Stored]:
            def find(expert: int) -> Stored:
                name = layer.format(e=expert)
                return Stored.find(
                    checkpoint, name, _names_of(checkpoint, name, op), op, transposed
                )

            if not fused:
                return find
            whole = find(0)
            return lambda expert: whole

        halves, second = [stored(layer) for layer in first], stored(down)
        firsts = tuple(tuple(half(e) for half in halves) for e in experts)
        downs = tuple(second(e) for e in experts)
        linear = downs[0].linear
        found = cls(firsts, downs, experts, linear, linear.scheme(scheme, op), op)
        found._check()
        return found

    @property
    def format(self) -> Format:
        """The format that the scheme has them in."""
        name = self.linear.stored_as(self.scheme)
        assert name is not None
        return FORMATS[name]

    @property
    def padded(self) -> int:
        """Rows of gate and of up, with those of zeros that fill their last blocks of scales. There
        are some where gate and up are stored apart and I is no multiple of 128."""
        rows = self.first[0][0].rows
        apart = len(self.first[0]) == 2 and self.format.name == "fp8_block"
        return -(-rows // BLOCK) * BLOCK if apart else rows

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(E, 2I, H) and (E, H, I), as they are read."""
        E, down = len(self.experts), self.down[0]
        columns = self.padded if len(self.first[0]) == 2 else down.columns
        first = (E, len(self.first[0]) * self.padded, self.first[0][0].columns)
        return first, (E, down.rows, columns)

    def expect_sizes(self, hidden_size: int | None, intermediate_size: int | None) -> None:
        """Raise unless the matrices have these sizes; None = any."""
        rows = sum(half.rows for half in self.first[0])
        H, I = hidden_size or self.down[0].rows, intermediate_size or self.down[0].columns
        allowed = (I, 2 * I)
        why = f"for hidden_size={H} and intermediate_size={I}"
        self.down[0].expect_shape((*self.down[0].shape[:-2], H, I), why, self.op)
        for half in self.first[0]:
            fits = half.columns == H and rows in allowed
            wanted = f"{' or '.join(map(str, allowed))} rows of {H} columns in all, {why}"
            expect(fits, self.op, f"{half.infos['data']}", wanted, f"{rows} of {half.columns}")

    @property
    def has_static_scales(self) -> bool:
        return self.scheme in ("fp8_tensor", "nvfp4") and self.linear.static

    def empty(self, dtype: torch.dtype, device: str | torch.device) -> list[QuantizedTensor]:
        """Both weights, with nothing in them."""
        halves = 2 if len(self.first[0]) == 2 else 1
        return [
            self._wrap(self._allocate(shape, count, device), shape, dtype)
            for shape, count in zip(self.shapes, (halves, 1), strict=True)
        ]

    def read_first(self, device: str | torch.device, dtype: torch.dtype) -> QuantizedTensor:
        """(E, 2I, H), expert by expert into a tensor on `device`."""
        return self._stack(self.first, self.shapes[0], device, dtype)

    def read_down(self, device: str | torch.device, dtype: torch.dtype) -> QuantizedTensor:
        """(E, H, I), likewise."""
        return self._stack([(matrix,) for matrix in self.down], self.shapes[1], device, dtype)

    def input_scales(self, device: str | torch.device) -> tuple[Tensor | None, Tensor | None]:
        """(E,) each: of the inputs of gate and up, the larger of theirs, and of down."""
        if not self.has_static_scales:
            return None, None
        both = [
            [
                max(half.input_scale(self.op, expert) for half in halves)
                for expert, halves in zip(self.experts, all_halves, strict=True)
            ]
            for all_halves in (self.first, [(matrix,) for matrix in self.down])
        ]
        first, second = (torch.tensor(scales, device=device) for scales in both)
        return first, second

    def _check(self) -> None:
        """Raise unless all experts are alike and the projections fit each other."""
        gate, H = self.first[0][0], self.down[0].rows
        I = gate.rows if len(self.first[0]) == 2 else self.down[0].columns
        for halves, down in zip(self.first, self.down, strict=True):
            for half in halves:
                half.expect_shape(
                    (*gate.shape[:-1], H), f"as {gate.layer} and down_proj say", self.op
                )
            down.expect_shape((*down.shape[:-2], H, I), "as expert 0 and its gate say", self.op)
            for matrix in (*halves, down):
                same = matrix.linear.format == self.linear.format
                wanted = f"{self.linear.format}, as the other experts of its layer are"
                expect(same, self.op, f"{matrix.infos['data']}", wanted, matrix.linear.format)
        if gate.fused:
            E, count = self.down[0].shape[0], gate.shape[0]
            expect(count == E, self.op, f"{gate.infos['data']}", f"of {E} experts", count)

    def _stack(
        self,
        matrices: Sequence[tuple[Stored, ...]],
        shape: tuple[int, int, int],
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> QuantizedTensor:
        """`matrices`: for each expert one matrix, or its halves."""
        halves = len(matrices[0])
        stacked: Parts | None = None
        for i, (expert, parts_of_one) in enumerate(zip(self.experts, matrices, strict=True)):
            pieces = [self._in_format(m.parts(self.op, expert), m.rows) for m in parts_of_one]
            if stacked is None:
                count = halves
                if halves == 1 and _one(self.format):
                    count = pieces[0].scale.numel()  # 2 if a fused tensor has halves
                stacked = self._allocate(shape, count, device)
            for half, piece in enumerate(pieces):
                self._write(stacked, piece, i, half if halves > 1 else None, shape[1] // halves)
        assert stacked is not None
        return self._wrap(_merged(stacked, self.format), shape, dtype)

    def _in_format(self, parts: Parts, rows: int) -> Parts:
        """One scale per matrix becomes one per row where the scheme has them so."""
        if self.format.name == self.linear.format:
            return parts
        scale = parts.scale
        if scale.ndim:  # halves
            scale = scale.repeat_interleave(rows // len(scale))
        return Parts(parts.data, scale.expand(rows), parts.global_scale)

    def _allocate(
        self, shape: tuple[int, int, int], halves: int, device: str | torch.device
    ) -> Parts:
        """Stacked tensors. Where no row of the file goes there are zeros."""
        spec = self.format
        make = torch.zeros if self.padded != self.first[0][0].rows else torch.empty
        E = shape[0]
        data = make(spec.data_shape(shape), dtype=torch.uint8, device=device)
        scale_shape = (E, halves) if _one(spec) else spec.scale_shape(shape, self._block)
        scale = torch.empty(scale_shape, dtype=spec.scale.storage, device=device)
        several = torch.empty(E, halves, device=device) if spec.has_global_scale else None
        return Parts(data.view(spec.element.storage), scale, several)

    @property
    def _block(self) -> tuple[int | None, int | None]:
        block = (BLOCK, BLOCK) if self.format.name == "fp8_block" else None
        return self.format.check_block_shape(block, self.op)

    def _write(self, into: Parts, piece: Parts, i: int, half: int | None, rows: int) -> None:
        """Put the parts of a matrix, or of one half, into expert `i`."""
        N, K = piece.data.shape
        start = (half or 0) * rows
        _bytes(into.data)[i, start : start + N, :K].copy_(_bytes(piece.data))
        if into.global_scale is not None:
            assert piece.global_scale is not None
            into.global_scale[i, slice(None) if half is None else half] = piece.global_scale
        if _one(self.format):
            into.scale[i, slice(None) if half is None else half] = piece.scale
            return
        block = self._block[0] or 1
        first = start // block
        target = _bytes(into.scale)[i, first : first + piece.scale.shape[0]]
        target.copy_(_bytes(piece.scale))

    def _wrap(
        self, parts: Parts, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> QuantizedTensor:
        return QuantizedTensor(
            parts.data, parts.scale, parts.global_scale, self.format.name, self._block, shape, dtype
        )


def _merged(parts: Parts, spec: Format) -> Parts:
    """One number for both halves where theirs are equal."""

    def merge(scale: Tensor) -> Tensor:
        return scale[:, 0].contiguous() if bool((scale == scale[:, :1]).all()) else scale

    scale = merge(parts.scale) if _one(spec) else parts.scale
    several = parts.global_scale
    return Parts(parts.data, scale, None if several is None else merge(several))


def _one(spec: Format) -> bool:
    """Whether a matrix has one scale."""
    return spec.block_shape == (None, None)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _names_of(checkpoint: Checkpoint, layer: str, op: str | None = None) -> dict[str, str]:
    """The tensors of a layer, by role. With `op`, raises ``ValueError`` if there is no data."""
    quantization = checkpoint.quantization
    if quantization is None:
        return {"data": f"{layer}.weight"} if f"{layer}.weight" in checkpoint else {}
    names = quantization.names
    found: dict[str, str] = {}
    for role in ROLES:
        options = [f"{layer}.{last}" for last in names.of_linear.get(role, ())]
        options += [layer + ending for ending in names.of_fused.get(role, ())]
        present = [name for name in options if name in checkpoint]
        if present:
            found[role] = present[0]
        elif role == "data" and op is not None:
            checkpoint.info(options[0])  # raises, and says what is beside it
    return found


def _has_codes(checkpoint: Checkpoint, names: dict[str, str]) -> bool:
    return "data" in names and checkpoint.info(names["data"]).dtype in CODES
