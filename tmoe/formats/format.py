"""What each number format is, as data.

A format stores a matrix as narrow *codes* and, for each block of codes, a *scale* that they share:

    value = code · scale of its block                     fp8_*, mxfp8, mxfp4
    value = code · scale of its block · global scale      nvfp4

Everything else about a format is a field of its `Format`; kernels' callers, `QuantizedTensor`, the
documentation and the tests all read it from `FORMATS`. The numbers are those of the OCP 8-bit
floating point specification (e4m3), of the OCP Microscaling specification (e2m1, e8m0, blocks of
32) and of NVIDIA's NVFP4 (blocks of 16 with e4m3 scales).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..checks import expect, expect_type

Block = tuple[int | None, int | None]  # rows, columns; None = all of them


@dataclass(frozen=True, slots=True)
class ElementType:
    """The type of one stored number, of a code or of a scale. Magnitudes are positive."""

    name: str
    bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float  # smallest_normal where there are no subnormals
    has_nan: bool
    has_inf: bool
    storage: torch.dtype  # of a tensor of them; two 4-bit codes share a uint8
    values: tuple[float, ...] = ()  # what each code means, listed for the 4-bit type

    @property
    def last_step(self) -> float:
        """From the second largest value to `max`."""
        mantissa_steps = self.smallest_normal / self.smallest_subnormal  # per power of two
        return 2.0 ** math.floor(math.log2(self.max)) / mantissa_steps


FLOAT32 = ElementType(
    "float32", 32, (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-149, True, True, torch.float32
)
E4M3 = ElementType("e4m3", 8, 448.0, 2.0**-6, 2.0**-9, True, False, torch.float8_e4m3fn)
E8M0 = ElementType("e8m0", 8, 2.0**127, 2.0**-127, 2.0**-127, True, False, torch.uint8)
_E2M1_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = ElementType(
    "e2m1", 4, 6.0, 1.0, 0.5, False, False, torch.uint8,
    values=(*_E2M1_POSITIVE, *(-value for value in _E2M1_POSITIVE)),
)  # fmt: skip

# What the quantisers of kernels/ make: codes under scales of a type, in blocks of that shape alone
# or, None, of any (on a GPU, of powers of two). Another pair of types needs a quantiser first.
QUANTISERS: dict[tuple[ElementType, ElementType], Block | None] = {
    (E4M3, FLOAT32): None,
    (E4M3, E8M0): (1, 32),
    (E2M1, E8M0): (1, 32),
    (E2M1, E4M3): (1, 16),
}


@dataclass(frozen=True, slots=True)
class Format:
    """A number format, hashable. The last five fields are sentences of the documentation.

    Shapes below are those of the matrix that is meant, (..., M, K) with the contracted dimension
    last; leading dimensions are experts. A vector (K,) has no rows and counts as one.
    """

    name: str
    element: ElementType
    scale: ElementType
    block_shapes: tuple[Block, ...]  # allowed; the first is the default
    scale_rules: tuple[str, ...] = ()  # how a power-of-two scale is chosen
    default_scale_rule: str | None = None  # None: the scale isn't rounded to a power of two
    has_global_scale: bool = False
    zeros: str = ""  # what becomes of a block of zeros
    subnormals: str = ""
    nan: str = ""
    inf: str = ""
    overflow: str = ""

    def __post_init__(self) -> None:
        made = (self.element, self.scale)
        known = " or ".join(f"{codes.name} under {scale.name}" for codes, scale in QUANTISERS)
        got = f"{self.element.name} under {self.scale.name}"
        expect(made in QUANTISERS, f"Format {self.name}", "element and scale", known, got)
        block = QUANTISERS[made]
        expect(
            block is None or self.block_shapes == (block,),
            f"Format {self.name}", "block_shapes", f"({block},) for {got}", self.block_shapes,
        )  # fmt: skip

    @classmethod
    def of(cls, format: str | Format, op: str) -> Format:
        """`format` itself, or the one of that name; `op` is whom an error names."""
        if isinstance(format, Format):
            return format
        expect_type(format, (str, Format), op, "format")
        expect(format in FORMATS, op, "format", f"one of {', '.join(FORMATS)}", repr(format))
        return FORMATS[format]

    @property
    def block_shape(self) -> Block:
        """The default block shape."""
        return self.block_shapes[0]

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two codes: element 2i in the low nibble, 2i + 1 in the high one."""
        return self.element.bits == 4

    def check_block_shape(self, block_shape: Sequence[int | None] | None, op: str) -> Block:
        """`block_shape`, or the default for None; raises unless the format allows it."""
        if block_shape is None:
            return self.block_shape
        expect_type(block_shape, (tuple, list, torch.Size), op, "block_shape")
        given = tuple(block_shape)
        wanted = f"{' or '.join(map(str, self.block_shapes))} for {self.name}"
        for block in self.block_shapes:
            if block == given:
                return block
        raise ValueError(f"{op}: block_shape must be {wanted}, got {given}")

    def check_scale_rule(self, scale_rule: str | None, op: str) -> str | None:
        """`scale_rule`, or the default for None; raises unless the format offers it."""
        if scale_rule is None:
            return self.default_scale_rule
        expect_type(scale_rule, str, op, "scale_rule")
        names = " or ".join(("None", *self.scale_rules))
        wanted = f"{names} for {self.name}"
        expect(scale_rule in self.scale_rules, op, "scale_rule", wanted, repr(scale_rule))
        return scale_rule

    def data_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the codes' tensor; a packed row has half as many bytes as values."""
        return (*shape[:-1], shape[-1] // 2) if self.is_packed else tuple(shape)

    def scale_shape(
        self, shape: Sequence[int], block_shape: Block | None = None
    ) -> tuple[int, ...]:
        """One scale for each block; the last block of a row or a column may be partial."""
        rows, columns = block_shape or self.block_shape
        *lead, K = shape
        blocks = lead[:-1]
        if rows is not None:
            blocks += [-(-M // rows) for M in lead[-1:]]  # a vector has no rows
        if columns is not None:
            blocks.append(-(-K // columns))
        return tuple(blocks)

    def scale_shapes(
        self, shape: Sequence[int], block_shape: Block | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Shapes that given scales may have: the above or, where a matrix has one scale, one for
        each half of its rows (gate and up)."""
        whole_matrix = (block_shape or self.block_shape) == (None, None)
        usual = (self.scale_shape(shape, block_shape),)
        return usual + _of_halves(shape) if whole_matrix else usual

    def global_scale_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Shapes that a global scale may have: one for each matrix, or one for each half of its
        rows. Nothing for a format without."""
        return (tuple(shape[:-2]), *_of_halves(shape)) if self.has_global_scale else ()

    def bits_per_value(self, shape: Sequence[int], block_shape: Block | None = None) -> float:
        """Bits of codes, scales and one global scale per matrix, divided by the values."""
        bits = 8 * math.prod(self.data_shape(shape)) * self.element.storage.itemsize
        bits += self.scale.bits * math.prod(self.scale_shape(shape, block_shape))
        bits += FLOAT32.bits * math.prod(shape[:-2]) if self.has_global_scale else 0
        return bits / math.prod(shape)


def _of_halves(shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """(..., M, K) -> ((..., 2),) if M is even."""
    return ((*shape[:-2], 2),) if len(shape) > 1 and shape[-2] % 2 == 0 else ()


_fp8_tensor = Format(
    "fp8_tensor",
    E4M3,
    scale=FLOAT32,
    block_shapes=((None, None),),
    zeros="scale 1, codes 0",
    subnormals="kept in steps of scale · 2^-9; half a step and less becomes 0",
    overflow="saturates at ±448 · scale, under a given scale; a computed one covers all values",
    nan="its block comes back as NaN; under a given scale, only itself",
    inf="its block comes back as NaN; under a given scale it saturates",
)
_mxfp8 = Format(
    "mxfp8",
    E4M3,
    scale=E8M0,
    block_shapes=((1, 32),),
    scale_rules=("floor", "even", "ceil"),
    default_scale_rule="ceil",
    zeros="scale byte 0 (2^-127), codes 0",
    subnormals="kept in steps of scale · 2^-9; half a step and less becomes 0",
    overflow="floor: saturates at ±448 · scale; even and ceil: nothing is beyond it",
    nan="scale byte 255: its block comes back as NaN",
    inf="scale byte 254: comes back as ±Inf, its neighbours as 0",
)
_formats = (
    _fp8_tensor,
    replace(_fp8_tensor, name="fp8_token", block_shapes=((1, None),)),
    replace(_fp8_tensor, name="fp8_channel", block_shapes=((1, None),)),
    replace(
        _fp8_tensor,
        name="fp8_block",
        block_shapes=((1, 128), (128, 128)),
        scale_rules=("ceil",),
        inf=f"{_fp8_tensor.inf}; with ceil it comes back as ±Inf, its neighbours as 0",
    ),
    _mxfp8,
    replace(
        _mxfp8,
        name="mxfp4",
        element=E2M1,
        default_scale_rule="even",
        subnormals="kept in steps of scale / 2; half a step and less becomes 0",
        overflow="floor and even: saturates at ±6 · scale; ceil: nothing is beyond it",
    ),
    Format(
        "nvfp4",
        E2M1,
        scale=E4M3,
        block_shapes=((1, 16),),
        has_global_scale=True,
        zeros="scale byte 0, codes 0; in a matrix of zeros, global scale 1",
        subnormals="kept in steps of half the scale, which goes down to 2^-9 · global scale",
        overflow="saturates at ±6 · 448 · global scale, under a given global scale",
        nan="its matrix comes back as NaN; under a given global scale, its block",
        inf="its matrix comes back as NaN; under a given global scale it saturates",
    ),
)
FORMATS: dict[str, Format] = {format.name: format for format in _formats}
