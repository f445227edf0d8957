"""How to quantise: a format with its choices made, and the checks of what is to be quantised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import expect, expect_tensor, expect_type
from .format import FLOAT32, FORMATS, Block, Format
from .parts import FLOATS
from .quantized_tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class Recipe:
    """A format, hashable, with nothing left to default."""

    format: Format
    block_shape: Block
    scale_rule: str | None

    @classmethod
    def of(
        cls,
        op: str,
        format: str | Format,
        block_shape: Sequence[int | None] | None = None,
        scale_rule: str | None = None,
    ) -> Recipe:
        """The format's defaults for None; raises for what the format doesn't offer."""
        chosen = Format.of(format, op)
        block = chosen.check_block_shape(block_shape, op)
        return cls(chosen, block, chosen.check_scale_rule(scale_rule, op))

    @classmethod
    def held_by(cls, q: QuantizedTensor) -> Recipe:
        """Format and block shape of `q`, which doesn't say how its scales were chosen."""
        return cls(FORMATS[q.format], q.block_shape, None)

    def empty(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> QuantizedTensor:
        """A tensor of that shape whose codes and scales are zero bytes, hence all values 0."""
        format = self.format
        parts = [
            torch.zeros(size, dtype=torch.uint8, device=device)
            if kind.itemsize == 1
            else torch.zeros(size, dtype=kind, device=device)
            for size, kind in (
                (format.data_shape(shape), format.element.storage),
                (format.scale_shape(shape, self.block_shape), format.scale.storage),
            )
        ]
        data, scale = parts[0].view(format.element.storage), parts[1].view(format.scale.storage)
        global_scale = None
        if format.has_global_scale:
            global_scale = torch.zeros(tuple(shape[:-2]), device=device)
        return QuantizedTensor(
            data, scale, global_scale, format.name, self.block_shape, shape, dtype
        )

    @property
    def words(self) -> tuple[str, int, str]:
        """The recipe as a torch op's arguments: format, place of the block shape, scale rule."""
        place = self.format.block_shapes.index(self.block_shape)
        return self.format.name, place, self.scale_rule or ""

    @classmethod
    def from_words(cls, format: str, block: int, scale_rule: str) -> Recipe:
        """The recipe whose `words` these are."""
        spec = FORMATS[format]
        return cls(spec, spec.block_shapes[block], scale_rule or None)


def check_input(op: str, x: Tensor, format: Format, arg: str = "x") -> None:
    """Raise unless `x` can be quantised to `format`."""
    expect_tensor(x, op, arg)
    quantized = isinstance(x, QuantizedTensor)
    expect(not quantized, op, arg, "an ordinary tensor: call .dequantize() first", x)
    expect(x.dtype in FLOATS, op, arg, "of dtype float32, bfloat16 or float16", x.dtype)
    ok = x.ndim >= 1 and x.shape[-1] >= 1
    expect(ok, op, arg, "of shape (..., K) with K at least 1", tuple(x.shape))
    if format.is_packed:
        wanted = f"of even row length: {format.name} packs two codes a byte"
        expect(x.shape[-1] % 2 == 0, op, arg, wanted, tuple(x.shape))
    needed = torch.is_grad_enabled() and x.requires_grad
    expect(not needed, op, arg, "detached: quantising has no gradient", "a tensor that needs one")


def given_scale(op: str, scale: Tensor | float | None, x: Tensor, recipe: Recipe) -> Tensor | None:
    """A static scale as fp32 of one of the format's scale shapes; a number, or a tensor with one,
    stands for all blocks."""
    if scale is None:
        return None
    name = recipe.format.name
    wanted = f"None for {name}, which derives its scales from x"
    expect(recipe.format.scale is FLOAT32, op, "scale", wanted, "a scale")
    expect(recipe.scale_rule is None, op, "scale_rule", "None with a given scale", "a rule")
    shapes = recipe.format.scale_shapes(x.shape, recipe.block_shape)
    return _broadcast(op, "scale", scale, shapes, x, least="at least 0")


def given_global_scale(
    op: str, global_scale: Tensor | float | None, x: Tensor, format: Format
) -> Tensor | None:
    """A static global scale as fp32, one for each matrix or each half of its rows."""
    if global_scale is None:
        return None
    expect(format.has_global_scale, op, "global_scale", f"None for {format.name}", "a global scale")
    shapes = format.global_scale_shapes(x.shape)
    return _broadcast(op, "global_scale", global_scale, shapes, x, least="above 0")


def _broadcast(
    op: str,
    arg: str,
    value: Tensor | float,
    shapes: tuple[tuple[int, ...], ...],
    x: Tensor,
    least: str,
) -> Tensor:
    """`value` in fp32 and of one of `shapes`. A single number becomes a tensor of the first one.

    Values are looked at where they are on the host; on a GPU that would mean waiting for it.
    """
    expect_type(value, (Tensor, float, int), op, arg)
    on_host = not isinstance(value, Tensor) or value.device.type == "cpu"
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
    expect(tensor.dtype in FLOATS, op, arg, "of dtype float32, bfloat16 or float16", tensor.dtype)
    shape = tuple(tensor.shape)
    fits = shape in shapes or tensor.numel() == 1
    wanted = " or ".join(map(str, shapes))
    expect(fits, op, arg, f"of shape {wanted}, or one number, for x {tuple(x.shape)}", shape)
    if on_host:
        low_enough = tensor > 0 if least == "above 0" else tensor >= 0
        usable = (torch.isfinite(tensor) & low_enough).all()
        expect(bool(usable), op, arg, f"finite and {least}", tensor.tolist())
    if not isinstance(value, Tensor):
        return torch.full(shapes[0], float(value), dtype=torch.float32, device=x.device)
    expect(tensor.device == x.device, op, arg, f"on x's device {x.device}", tensor.device)
    tensor = tensor.detach().float()
    return tensor if shape in shapes else tensor.reshape(()).expand(shapes[0]).contiguous()
