"""One quantised matrix of a checkpoint, or one for each expert: its parts, found and checked.

Everything here but `Stored.parts` looks at headers alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checks import expect
from ..formats import FORMATS, QuantizedTensor
from ..formats.parts import checked_data, checked_global_scale, checked_scale
from .checkpoint import Checkpoint
from .header import TensorInfo
from .quantization import LinearFormat

_BYTES = (torch.uint8, torch.int8)
_FLOATS = (torch.float32, torch.bfloat16)
_DATA = {"e4m3": (torch.float8_e4m3fn,), "e2m1": _BYTES}
_SCALE = {  # an fp8 scale in one byte is e8m0
    "float32": (*_FLOATS, torch.float8_e8m0fnu, torch.uint8),
    "e8m0": (torch.uint8, torch.float8_e8m0fnu),
    "e4m3": (torch.float8_e4m3fn,),
}
CODES = (*_BYTES, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
         torch.float8_e5m2fnuz)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one matrix (N, K), in the form that `QuantizedTensor` keeps them in."""

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix (N, K) in a checkpoint; or a fused tensor (E, N, K) with one for each expert.

    Made by `find`. Reading it copies nothing that needn't be converted: data are views of the
    file's pages.
    """

    checkpoint: Checkpoint
    layer: str
    linear: LinearFormat
    infos: dict[str, TensorInfo]  # by role
    shape: tuple[int, ...]
    transposed: bool  # stored as (E, K, N)

    @classmethod
    def find(
        cls,
        checkpoint: Checkpoint,
        layer: str,
        names: dict[str, str],
        op: str,
        transposed: bool | None = None,
    ) -> Stored:
        """The matrix of a layer whose tensors are `names`, by role. `transposed`: whether a fused
        one is stored as (E, K, N); None = as the method has them.

        Raises ``ValueError`` with the file, the tensor, what was wanted and what came.
        """
        quantization = checkpoint.quantization
        infos = {role: checkpoint.info(name) for role, name in names.items()}
        data = infos["data"]
        described = quantization is not None
        expect(described, op, f"{data}", "described by a quantization_config", data.words)
        assert quantization is not None
        linear = quantization.of(layer)
        known = f"of a layer that the quantization_config of {quantization.method} has a group for"
        expect(linear is not None, op, f"{data}", known, data.words)
        assert linear is not None
        stored = cls(checkpoint, layer, linear, infos, (), False)
        scale = infos.get("scale")
        if linear.format == "fp8_block" and scale and scale.shape in ((), (1,)):
            # an embedding, which has one scale, not blocks
            stored = replace(stored, linear=replace(linear, format="fp8_tensor"))
        transposed = quantization.names.transposed if transposed is None else transposed
        return replace(stored, transposed=stored.fused and transposed)._checked(op)

    @property
    def fused(self) -> bool:
        """Whether all experts are in it."""
        return not self.infos["data"].name.startswith(f"{self.layer}.")

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    def expect_shape(self, shape: Sequence[int], why: str, op: str) -> None:
        """Raise unless it is of that shape."""
        wanted = f"of shape {tuple(shape)}, {why}"
        data = self.infos["data"]
        got = f"{data.words}, which is {self.shape}"
        expect(self.shape == tuple(shape), op, f"{data}", wanted, got)

    def parts(self, op: str, expert: int | None = None) -> Parts:
        """Codes and scales of the matrix, or of the matrix of one expert, checked by value too."""
        spec = FORMATS[self.linear.format]
        block = spec.check_block_shape(self.linear.block_shape, op)
        matrix = self.shape[-2:]
        where = f"{op}: {self.infos['data']}"
        data = self._of("data", expert)
        if self.transposed:
            data = data.transpose(-1, -2)
        else:
            data = checked_data(data, matrix, spec, where)
        where = f"{op}: {self.infos['scale']}"
        scale = self._of("scale", expert)
        usual = spec.scale_shape(matrix, block)
        if self.transposed and block[1] is not None:
            scale = scale.transpose(-1, -2)
        elif scale.numel() == math.prod(usual):
            scale = scale.reshape(usual)
        if spec.scale.name == "float32" and scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        scale = checked_scale(scale, matrix, spec, block, where)
        global_scale = None
        if "global_scale" in self.infos:
            where = f"{op}: {self.infos['global_scale']}"
            global_scale = self._number("global_scale", expert)
            global_scale = checked_global_scale(global_scale, matrix, spec, where)
        return Parts(data.view(spec.element.storage), scale, global_scale)

    def input_scale(self, op: str, expert: int | None = None) -> float:
        """The static scale of the inputs, as a multiplier."""
        value = self._number("input_scale", expert).item()
        fits = math.isfinite(value) and value >= 0
        info = self.infos["input_scale"]
        expect(fits, op, f"{info}", "finite and at least 0, also as a multiplier", value)
        return value

    def dequantize(self, dtype: torch.dtype, device: torch.device, op: str) -> Tensor:
        """The values of one matrix, as an ordinary tensor, computed where it goes."""
        parts = self.parts(op)
        block = FORMATS[self.linear.format].check_block_shape(self.linear.block_shape, op)
        several = parts.global_scale
        q = QuantizedTensor(
            parts.data.to(device), parts.scale.to(device),
            None if several is None else several.to(device), self.linear.format, block, self.shape,
            torch.float32,
        )  # fmt: skip
        return q.dequantize(dtype)

    def _number(self, role: str, expert: int | None) -> Tensor:
        """A scale of the whole matrix, as a multiplier, in fp32."""
        info, value = self.infos[role], self._of(role, expert).float().reshape(())
        quantization = self.checkpoint.quantization
        assert quantization is not None
        divides = info.name.rpartition(".")[2] in quantization.names.divides
        return 1 / value if divides else value

    def _of(self, role: str, expert: int | None) -> Tensor:
        """The part of one expert; one number may stand for all of them."""
        value = self.checkpoint.view(self.infos[role].name)
        if expert is None or not self.fused:
            return value
        return value[expert] if value.ndim and value.shape[0] == self.shape[0] else value

    def _checked(self, op: str) -> Stored:
        """Itself with its shape, after a look at every header."""
        spec, data = FORMATS[self.linear.format], self.infos["data"]
        needs = {"scale", *(["global_scale"] if spec.has_global_scale else [])}
        if self.linear.static:
            needs.add("input_scale")
        for role in sorted(needs - set(self.infos)):
            self._missing(role, op)
        self._expect(data, _DATA[spec.element.name], op)
        sizes = data.shape
        if self.infos["data"].name.endswith("_blocks"):  # (E, N, K/32, 16)
            fits = len(sizes) == 4 and sizes[-1] == 16
            expect(fits, op, f"{data}", "of shape (E, N, K/32, 16)", sizes)
            sizes = (*sizes[:2], sizes[2] * 16)
        dims = 3 if self.fused else 2
        wanted = f"of {dims} dimensions"
        expect(len(sizes) == dims, op, f"{data}", wanted, f"shape {data.shape}")
        *lead, N, K = (sizes[0], sizes[2], sizes[1]) if self.transposed else sizes
        K = 2 * K if spec.is_packed else K
        shape = (*lead, N, K)
        self._check_scale(shape, op)
        E = lead[0] if lead else 1
        for role in ("global_scale", "input_scale"):
            if info := self.infos.get(role):
                self._expect(info, _FLOATS, op)
                count = math.prod(info.shape)
                ones = "one number" if E == 1 else f"one number, or one for each of {E} experts"
                expect(count in (1, E), op, f"{info}", ones, f"shape {info.shape}")
        return replace(self, shape=shape)

    def _check_scale(self, shape: tuple[int, ...], op: str) -> None:
        spec = FORMATS[self.linear.format]
        info = self.infos["scale"]
        self._expect(info, _SCALE[spec.scale.name], op)
        block = spec.check_block_shape(self.linear.block_shape, op)
        usual = spec.scale_shape(shape, block)
        *lead, N, K = shape
        if block == (None, None):
            fitting = {usual, (), (1,), (1, 1), (*usual, 1), (*usual, 1, 1), (*usual, 2, 1)}
        elif block[1] is None:
            fitting = (
                {usual, (*usual, 1), (*lead, 1, N)} if self.transposed else {usual, (*usual, 1)}
            )
        elif self.transposed:
            fitting = {(*usual[:-2], usual[-1], usual[-2])}
        else:
            fitting = {usual, (*usual[:-2], usual[-2], 1, usual[-1], 1)}
        shapes = " or ".join(str(s) for s in sorted(fitting, key=len)[:2])
        wanted = f"of shape {shapes} for {spec.name} weights {shape}"
        expect(info.shape in fitting, op, f"{info}", wanted, f"shape {info.shape}")

    def _missing(self, role: str, op: str) -> None:
        quantization = self.checkpoint.quantization
        assert quantization is not None
        names, data = quantization.names, self.infos["data"]
        if self.fused:
            options = [self.layer + ending for ending in names.of_fused.get(role, ())]
        else:
            options = [f"{self.layer}.{last}" for last in names.of_linear.get(role, ())]
        wanted = f"beside its {role.replace('_', ' ')}, {' or '.join(options)}"
        what = f"{self.linear.format} weights with {self.linear.inputs or 'unquantised'} inputs"
        expect(False, op, f"{data}", wanted, f"none for {what}")

    @staticmethod
    def _expect(info: TensorInfo, dtypes: tuple[torch.dtype, ...], op: str) -> None:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        expect(info.dtype in dtypes, op, f"{info}", f"of dtype {names}", info.words)


def quantized_layers(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """The tensors of each quantised layer, by role. What belongs to none is an ordinary tensor."""
    if checkpoint.quantization is None:
        return {}
    layers: dict[str, dict[str, str]] = {}
    for name in checkpoint:
        if found := checkpoint.quantization.names.split(name):
            layer, role = found
            layers.setdefault(layer, {})[role] = name

    def is_quantized(names: dict[str, str]) -> bool:
        if "data" not in names:
            return False
        has_codes = checkpoint.info(names["data"]).dtype in CODES
        # a parameter called just "scale" may be a norm's
        return has_codes or ("scale" in names and not names["scale"].endswith(".scale"))

    return {layer: names for layer, names in layers.items() if is_quantized(names)}
