"""`QuantizedTensor`: codes, scales and what they mean, as one tensor of a module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import expect, expect_type
from .aten import IMPLEMENTED, refuse
from .compute import dequantize_parts
from .format import FORMATS, Block, Format
from .parts import checked_data, checked_global_scale, checked_scale, logical_shape

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # nominal dtypes


class QuantizedTensor(Tensor):
    """A matrix (..., M, K) in a number format; leading dimensions are experts.

    Made by `tmoe.quantize` or, from what a checkpoint holds, by `from_parts`. It is a parameter or
    a buffer like any other: it moves with its module, is saved in its state dict, and can be
    copied, pickled, sliced by expert (``q[3]``, ``q[2:5]``, ``q[[0, 2]]``), cut along rows and
    columns where that cuts no block (``q[:, :128]``, ``q.chunk(2, dim=1)``), and joined by
    `torch.cat` and `torch.stack`. It takes part in no arithmetic and has no gradient;
    ``q.dequantize()`` gives an ordinary tensor.

    Attributes:
        data: the codes, float8_e4m3fn (..., M, K), or uint8 (..., M, K/2) for 4-bit formats. This
            hides the attribute `data` of other tensors: there is no tensor underneath.
        scale: fp32, float8_e4m3fn, or uint8 with e8m0 exponents; one per block. fp8_tensor's may
            be (..., 2): the halves of the rows have their own.
        global_scale: fp32, one per expert or (..., 2) for the halves of its rows; None where the
            format has none.
        format: its name; ``tmoe.formats.FORMATS[q.format]`` describes it.
        block_shape: (rows, columns) that share a scale; None = all of them.
        shape, dtype: of the matrix that is meant. The dtype is nominal: ``q.to(dtype)`` changes
            nothing else.
        nbytes: what codes and scales take up.
    """

    _data: Tensor
    _scale: Tensor
    _global_scale: Tensor | None
    format: str
    block_shape: Block

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        data: Tensor,
        scale: Tensor,
        global_scale: Tensor | None,
        format: str,
        block_shape: Block,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> QuantizedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=data.device, requires_grad=False
        )

    def __init__(
        self,
        data: Tensor,
        scale: Tensor,
        global_scale: Tensor | None,
        format: str,
        block_shape: Block,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """Unchecked; see `from_parts` and `tmoe.quantize`."""
        self._data, self._scale, self._global_scale = data, scale, global_scale
        self.format, self.block_shape = format, block_shape

    @classmethod
    def from_parts(
        cls,
        data: Tensor,
        scale: Tensor,
        *,
        format: str | Format,
        shape: Sequence[int] | None = None,
        global_scale: Tensor | None = None,
        block_shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> QuantizedTensor:
        """What a checkpoint holds, checked.

        Args:
            data: codes. float8_e4m3fn (..., M, K), or for 4-bit formats uint8 or int8 (..., M, K/2)
                with the even element in the low nibble.
            scale: one per block, see ``FORMATS[format].scale_shapes``; further dimensions of size 1
                at the end are dropped. fp8_*: float32, bfloat16, or float8_e8m0fnu, kept as
                float32; mx*: uint8 or float8_e8m0fnu; nvfp4: float8_e4m3fn.
            format: a name, or a `Format`; nothing is guessed from the number of elements.
            shape: (..., M, K); needed only where `data` splits rows into further dimensions.
            global_scale: nvfp4's multiplier (value = code · scale · global scale): (...), or
                (..., 2) if the two halves of the rows have their own. A checkpoint that stores the
                divisor (compressed-tensors) is inverted by whoever reads it.
            block_shape: (1, 128) or (128, 128) for fp8_block.
            dtype: the nominal dtype.

        It looks at the scales' values, so on a GPU it waits for the device; call it at load time.

        Raises:
            TypeError: an argument that isn't of its class.
            ValueError: a dtype, a shape or a value that the format can't have.
        """
        op = "QuantizedTensor.from_parts"
        spec = Format.of(format, op)
        block = spec.check_block_shape(block_shape, op)
        _expect_float(dtype, op)
        logical = logical_shape(data, shape, spec, op)
        data = checked_data(data, logical, spec, op)
        scale = checked_scale(scale, logical, spec, block, op)
        global_scale = checked_global_scale(global_scale, logical, spec, op)
        for arg, part in (("scale", scale), ("global_scale", global_scale)):
            if part is not None:
                expect(part.device == data.device, op, arg, f"on {data.device}", part.device)
        return cls(data, scale, global_scale, spec.name, block, logical, dtype)

    @property
    def data(self) -> Tensor:
        return self._data

    @data.setter
    def data(self, new: Tensor) -> None:  # peft.prepare_model_for_kbit_training tries to
        what = "are the codes and can't be replaced; to train adapters nothing has to be prepared"
        raise AttributeError(f"QuantizedTensor: .data {what}")

    @property
    def scale(self) -> Tensor:
        return self._scale

    @property
    def global_scale(self) -> Tensor | None:
        return self._global_scale

    def parts(self) -> list[Tensor]:
        """Codes, scales and, if there is one, the global scale. Code that `torch.compile` traces
        takes the codes from here: to a tracer, `data` means what it means on any tensor."""
        parts = [self._data, self._scale]
        return parts if self._global_scale is None else [*parts, self._global_scale]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(part.nbytes for part in self.parts())

    @property
    def bits_per_value(self) -> float:
        """Bits of codes and scales, divided by the number of values."""
        return 8 * self.nbytes / self.numel()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """An ordinary tensor of this shape: code · scale (· global scale) in fp32, then `dtype`."""
        _expect_float(dtype, "dequantize")
        spec, narrow = FORMATS[self.format], torch.float32 if dtype == torch.float64 else dtype
        values = dequantize_parts(
            self._data, self._scale, self._global_scale, spec, self.block_shape, narrow
        )
        return values.to(dtype)

    def requires_grad_(self, requires_grad: bool = True) -> QuantizedTensor:
        wanted = (
            "False: quantised weights are frozen; train adapters on it (tmoe.lora.add), or train a "
            "layer that isn't quantised and quantise it afterwards"
        )
        expect(not requires_grad, "QuantizedTensor", "requires_grad", wanted, requires_grad)
        return self

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def share_memory_(self) -> QuantizedTensor:
        for part in self.parts():
            part.share_memory_()
        return self

    def data_ptr(self) -> int:
        refuse("data_ptr", "would be a null pointer")

    def __dlpack__(self, *args: object, **kwargs: object) -> object:
        refuse("__dlpack__", "would be a null pointer")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, scale = tuple(self.shape), self._scale
        block = "" if self.block_shape[1] is None else f", block_shape={self.block_shape}"
        scale_dtype = FORMATS[self.format].scale.name
        size = f", {self.bits_per_value:.3g} bits per value" if self.numel() else ""
        return (
            f"QuantizedTensor({self.format}, shape={shape}{block}, dtype={self.dtype}, "
            f"device='{self.device}', scale={scale_dtype} {tuple(scale.shape)}{size})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) not in memo:
            memo[id(self)] = result = self.detach()
            result.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # float8 tensors can't be pickled (torch 2.13), so their bytes are.
        scale = self._scale
        arguments = (
            self._data.view(torch.uint8),
            scale if scale.dtype == torch.float32 else scale.view(torch.uint8),
            self._global_scale, self.format, self.block_shape, tuple(self.shape), self.dtype,
            isinstance(self, torch.nn.Parameter),
        )  # fmt: skip
        return _rebuild, arguments

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = ["_data", "_scale"] + ["_global_scale"] * (self._global_scale is not None)
        return names, (self.format, self.block_shape, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], context: tuple[Any, ...], shape: Sequence[int], stride: object
    ) -> QuantizedTensor:
        format, block_shape, dtype = context
        return QuantizedTensor(
            parts["_data"], parts["_scale"], parts.get("_global_scale"), format, block_shape,
            shape, dtype,
        )  # fmt: skip

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        implementation = IMPLEMENTED.get(func)
        first = args[0] if args else None
        if isinstance(first, list | tuple) and first:  # of cat and stack
            first = first[0]
        if implementation is None or not isinstance(first, QuantizedTensor):
            refuse(func)
        return implementation(func, *args, **(kwargs or {}))

    def _with_parts(
        self, parts: Iterable[Tensor], dtype: torch.dtype | None = None
    ) -> QuantizedTensor:
        """Other parts of the same format; the sizes may differ."""
        data, scale, *rest = parts
        shape = (*data.shape[:-1], data.shape[-1] * (2 if FORMATS[self.format].is_packed else 1))
        global_scale = rest[0] if rest else None
        return QuantizedTensor(
            data, scale, global_scale, self.format, self.block_shape, shape, dtype or self.dtype
        )

    def _map(
        self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> QuantizedTensor:
        return self._with_parts(map(function, self.parts()), dtype)

    def _is_like(self, other: QuantizedTensor) -> bool:
        """Whether the other one's parts mean the same here."""
        mine, others = self.parts(), other.parts()
        return (
            (self.format, self.block_shape, self.shape)
            == (other.format, other.block_shape, other.shape)
            and [part.shape for part in mine] == [part.shape for part in others]
        )  # fmt: skip


def _expect_float(dtype: torch.dtype, op: str) -> None:
    expect_type(dtype, torch.dtype, op, "dtype")
    expect(dtype in FLOATS, op, "dtype", "float32, bfloat16, float16 or float64", dtype)


def _rebuild(
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    format: str,
    block_shape: Block,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    is_parameter: bool,
) -> Tensor:
    """Undo `QuantizedTensor.__reduce_ex__`."""
    spec = FORMATS[format]
    codes, scale = data.view(spec.element.storage), scale.view(spec.scale.storage)
    result = QuantizedTensor(codes, scale, global_scale, format, block_shape, shape, dtype)
    return torch.nn.Parameter(result, requires_grad=False) if is_parameter else result


# So that torch.load(..., weights_only=True) accepts a QuantizedTensor.
torch.serialization.add_safe_globals([_rebuild])
